"""What the service can be told: every field is also an environment variable with the prefix ``WINNOW_``."""

from __future__ import annotations

from pydantic import AnyHttpUrl, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from winnow_service.store.open import StoreAddressError, parse_store_url


class Settings(BaseSettings):
    """Settings of the service. Times are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="WINNOW_", frozen=True, hide_input_in_errors=True)

    runtime_url: AnyHttpUrl = Field(
        default=AnyHttpUrl("http://127.0.0.1:30000"), description="Base address of the SGLang server."
    )
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1, description="Largest request body that is read.")
    runtime_connect_timeout_seconds: float = Field(default=5.0, gt=0)
    runtime_silence_timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="Longest silence of the runtime within one answer. Includes the time that a request waits in its "
        "queue, and all of the generation when the answer is not streamed.",
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
    metrics_public: bool = Field(default=False, description="Serve /metrics without a key.")

    @field_validator("store_url")
    @classmethod
    def _is_a_store(cls, url: SecretStr) -> SecretStr:
        try:
            parse_store_url(url.get_secret_value())
        except StoreAddressError as error:
            raise ValueError(str(error)) from None
        return url
