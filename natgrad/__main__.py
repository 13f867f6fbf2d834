from natgrad.cli import main

main()
