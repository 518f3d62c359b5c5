"""Whether traces are wanted: by OpenTelemetry's own environment variables.

``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``) says where they go, by OTLP over HTTP. The
others that the SDK knows hold too: ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, and so on. What FastAPI has of its
own for this is not used: its spans have the whole query, and its log the messages of exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from winnow_service.tracing.spans import Tracing

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP: Final = "http/protobuf"


class TracingRefused(Exception):
    """Traces cannot be sent as the environment says. The message names the variable."""


def tracing_from_environment(environment: Mapping[str, str]) -> Tracing | None:
    """Begin tracing if ``environment``, which must be the process's own, asks for it. Else no exporter is loaded.

    Raises:
        TracingRefused: for what the service cannot do.
    """
    if not any(environment.get(name) for name in _ENDPOINTS) or not _is_enabled(environment):
        return None
    name = next((name for name in _PROTOCOLS if environment.get(name)), _PROTOCOLS[-1])
    if (protocol := environment.get(name, _HTTP)) != _HTTP:
        raise TracingRefused(f"{name}: must be {_HTTP}, not {protocol!r}")
    from winnow_service.tracing.spans import Tracing  # noqa: PLC0415 takes a third of a second, only where wanted

    return Tracing()


def _is_enabled(environment: Mapping[str, str]) -> bool:
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not is_disabled and environment.get("OTEL_TRACES_EXPORTER", "otlp") != "none"
