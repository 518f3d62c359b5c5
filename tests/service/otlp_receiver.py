"""A receiver of traces by OTLP over HTTP that keeps the spans it is sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PROTOBUF = "application/x-protobuf"


@dataclass
class Receiver:
    """What came, span by span; ``bodies`` as it came."""

    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    bodies: list[bytes] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/traces", self.receive, methods=["POST"])
        return app

    async def receive(self, request: Request) -> Response:
        assert request.headers["content-type"] == PROTOBUF
        self.bodies.append(await request.body())
        export = ExportTraceServiceRequest.FromString(self.bodies[-1])
        for resource in export.resource_spans:
            self.services.add(str(attributes(resource.resource.attributes)["service.name"]))
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return Response(ExportTraceServiceResponse().SerializeToString(), media_type=PROTOBUF)

    def named(self, name: str) -> Span:
        """The one span with that name."""
        [found] = [span for span in self.spans if span.name == name]
        return found


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as a dictionary."""
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
