"""A report on a problem: one web page that needs no network, and its numbers as JSON and CSV."""

from natgrad.report.files import write_report as write_report
