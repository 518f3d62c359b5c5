"""Traces of requests for OpenTelemetry, if they are wanted."""
