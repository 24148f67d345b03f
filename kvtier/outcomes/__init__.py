"""Why requests hit or missed, what each pin saved, and what a request would get now (ADR 29)."""
