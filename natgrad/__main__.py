from natgrad.cli import app

app()
