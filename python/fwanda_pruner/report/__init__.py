"""The record of a run (`record`), and what is made of it: tables and summaries (`text`) and model cards (`card`)."""
