"""What the service can be told: every field is also an environment variable with the prefix ``WINNOW_``."""

from __future__ import annotations

import os
from typing import Annotated, Final

from pydantic import AnyUrl, Field, SecretStr, UrlConstraints, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from winnow_service.logs import LogFormat, LogLevel
from winnow_service.store.open import parse_store_url
from winnow_service.store.redis_connection import StoreAddressError

RuntimeUrl = Annotated[AnyUrl, UrlConstraints(allowed_schemes=["http", "https"], host_required=True)]
_ONE_RUNTIME: Final = (
    "must be one address, of a runtime or of a balancer in front of several (docs/operation.md, Several runtimes)"
)


class Settings(BaseSettings):
    """Settings of the service. Times are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="WINNOW_", frozen=True, hide_input_in_errors=True)

    runtime_url: RuntimeUrl = Field(
        default=AnyUrl("http://127.0.0.1:30000"),
        description="Base address of the SGLang server, or of a balancer in front of several that serve one model.",
    )
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1, description="Largest request body that is read.")
    max_header_bytes: int = Field(
        default=64 * 1024, ge=1024, description="Longest head of a request (its first line and headers) that is read."
    )
    max_running: int = Field(default=1024, ge=1, description="Generation requests that are sent at once.")
    max_queued: int = Field(default=1024, ge=0, description="Generation requests that may wait for others to end.")
    max_queued_per_key: int = Field(default=256, ge=0, description="Of one key.")
    queue_timeout_seconds: float = Field(default=30.0, gt=0, description="Longest wait for others to end.")
    runtime_connect_timeout_seconds: float = Field(default=5.0, gt=0)
    first_token_timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="Longest wait for the first token of a stream, with the time in the runtime's own queue.",
    )
    runtime_silence_timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        description="Longest silence within a stream. A runtime that reads a long prompt may keep others waiting.",
    )
    request_timeout_seconds: float = Field(default=3600.0, gt=0, description="Longest time for a whole answer.")
    client_stall_timeout_seconds: float = Field(
        default=60.0, gt=0, description="Longest time for a client to take what it is sent."
    )
    breaker_failures: int = Field(
        default=5, ge=1, description="Failures in a row after which the runtime is not asked for a while."
    )
    breaker_open_seconds: float = Field(default=5.0, gt=0, description="Until a request tries it again.")
    drain_timeout_seconds: float = Field(
        default=45.0, ge=0, description="How long answers that are being given may go on after a signal to stop."
    )
    readiness_path: str = Field(
        default="/health", pattern="^/", description="Asked of the runtime to see if it answers."
    )
    readiness_interval_seconds: float = Field(default=1.0, gt=0)
    readiness_timeout_seconds: float = Field(
        default=30.0, gt=0, description="SGLang itself takes up to 20 seconds to say that it is not healthy."
    )
    runtime_api_key: SecretStr | None = Field(
        default=None, description="Sent to the runtime in place of a client's key of the service."
    )
    store_url: SecretStr = Field(
        default=SecretStr("sqlite:///.winnow/control.db"),
        description="Where policies and keys are kept: sqlite:///file for one service, or for several "
        "redis[s]://, redis[s]+sentinel:// or redis[s]+cluster://.",
    )
    store_password: SecretStr | None = Field(default=None, description="Of Redis, in place of one in the address.")
    store_namespace: str = Field(
        default="winnow",
        pattern="^[a-z0-9-]{1,64}$",
        description="Tells apart deployments that share one Redis; its keys begin with {namespace}.",
    )
    admin_key: SecretStr | None = Field(
        default=None,
        min_length=32,
        description="A key with every scope that is not in the store, to make the first ones with: 32 random "
        "characters or more.",
    )
    allow_open: bool = Field(
        default=False, description="Serve without keys on addresses that other machines can reach, too."
    )
    log_format: LogFormat | None = Field(
        default=None, description="json or text; by default text on a terminal, and JSON elsewhere."
    )
    log_level: LogLevel = Field(default="info", description="Of the service's own lines.")
    metrics_public: bool = Field(default=False, description="Serve /metrics without a key.")

    @model_validator(mode="before")
    @classmethod
    def _has_no_list_of_runtimes(cls, values: object) -> object:
        # Without this, a service that was given several would ask the default one.
        if "WINNOW_RUNTIME_URLS" in os.environ:
            raise ValueError(f"WINNOW_RUNTIME_URLS is now WINNOW_RUNTIME_URL, which {_ONE_RUNTIME}")
        return values

    @field_validator("runtime_url", mode="before")
    @classmethod
    def _is_one_runtime(cls, url: object) -> object:
        if "," in str(url) or str(url).startswith("dns+http"):
            raise ValueError(_ONE_RUNTIME)
        return url

    @field_validator("runtime_url")
    @classmethod
    def _names_a_runtime(cls, url: RuntimeUrl) -> RuntimeUrl:
        if url.username or url.password:
            raise ValueError("no user or password in the address: use WINNOW_RUNTIME_API_KEY")
        if url.query or url.fragment:
            raise ValueError("nothing behind the path of the address")
        return url

    @field_validator("store_url")
    @classmethod
    def _is_a_store(cls, url: SecretStr) -> SecretStr:
        try:
            parse_store_url(url.get_secret_value())
        except StoreAddressError as error:
            raise ValueError(str(error)) from None
        return url
