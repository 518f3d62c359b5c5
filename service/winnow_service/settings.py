"""What the service can be told: every field is also an environment variable with the prefix ``WINNOW_``."""

from __future__ import annotations

from typing import Annotated

from pydantic import AnyUrl, Field, SecretStr, UrlConstraints, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from winnow_service.logs import LogFormat, LogLevel
from winnow_service.store.open import StoreAddressError, parse_store_url

RuntimeUrl = Annotated[AnyUrl, UrlConstraints(allowed_schemes=["http", "https", "dns+http"], host_required=True)]


class Settings(BaseSettings):
    """Settings of the service. Times are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="WINNOW_", frozen=True, hide_input_in_errors=True)

    runtime_urls: Annotated[tuple[RuntimeUrl, ...], NoDecode] = Field(
        default=(AnyUrl("http://127.0.0.1:30000"),),
        min_length=1,
        description="Base addresses of the SGLang servers, separated by commas. All serve one model. One that begins "
        "with dns+http:// stands for all addresses of its host.",
    )
    runtime_dns_interval_seconds: float = Field(
        default=5.0, gt=0, description="How often the addresses behind dns+http:// are looked up."
    )
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1, description="Largest request body that is read.")
    max_header_bytes: int = Field(
        default=64 * 1024,
        ge=1024,
        description="Longest head of a request (its first line and headers) that is read.",
    )
    max_running: int = Field(
        default=1024, ge=1, description="Generation requests that are sent at once, for each runtime that answers."
    )
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
        default=5, ge=1, description="Failures in a row after which a runtime is not asked for a while."
    )
    breaker_open_seconds: float = Field(default=5.0, gt=0, description="Until a request tries it again.")
    affinity_load_factor: float = Field(
        default=1.25,
        ge=1,
        description="A runtime gets the prompts whose beginning it has cached up to so many times the mean load.",
    )
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

    @field_validator("runtime_urls", mode="before")
    @classmethod
    def _are_separated(cls, urls: object) -> object:
        return [url.strip() for url in urls.split(",")] if isinstance(urls, str) else urls

    @field_validator("runtime_urls")
    @classmethod
    def _name_runtimes(cls, urls: tuple[RuntimeUrl, ...]) -> tuple[RuntimeUrl, ...]:
        if any(url.username or url.password for url in urls):
            raise ValueError("no user or password in an address: use WINNOW_RUNTIME_API_KEY")
        if any(url.query or url.fragment for url in urls):
            raise ValueError("nothing behind the path of an address")
        if len({(url.host, url.port) for url in urls}) < len(urls):
            raise ValueError("each runtime once")
        return urls

    @field_validator("store_url")
    @classmethod
    def _is_a_store(cls, url: SecretStr) -> SecretStr:
        try:
            parse_store_url(url.get_secret_value())
        except StoreAddressError as error:
            raise ValueError(str(error)) from None
        return url
