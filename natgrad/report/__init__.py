"""Write a report: one web page that needs no network, with its numbers as JSON and CSV beside it."""

from natgrad.report.files import write_report as write_report
