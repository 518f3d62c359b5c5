"""What goes wrong with a request on its way to the runtime and back: logged and counted in one place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request

from winnow_service.errors import ClientDisconnected, RuntimeFailure
from winnow_service.headers import REQUEST_ID_HEADER
from winnow_service.metrics.instruments import Metrics
from winnow_service.proxy.request_facts import route_template

logger = logging.getLogger(__name__)


class Incidents:
    """Logs and counts what goes wrong with one request."""

    def __init__(self, request: Request, metrics: Metrics) -> None:
        self._request = request
        self._metrics = metrics

    def runtime_failed(self, failure: RuntimeFailure) -> None:
        """The runtime gives no answer, or no more of it."""
        logger.warning("Request %s: %s", self._request.headers[REQUEST_ID_HEADER], failure.message)
        self._metrics.runtime_errors.labels(failure.code).inc()

    def client_left(self) -> None:
        """The client does not wait for the end of the answer."""
        logger.info("Request %s: the client left", self._request.headers[REQUEST_ID_HEADER])
        self._metrics.client_disconnects.labels(route_template(self._request.scope)).inc()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take what is raised in this context, and let it pass."""
        try:
            yield
        except ClientDisconnected:
            self.client_left()
            raise
        except RuntimeFailure as failure:
            self.runtime_failed(failure)
            raise
