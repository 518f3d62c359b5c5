"""What the service can be told: every field is also an environment variable with the prefix ``WINNOW_``."""

from __future__ import annotations

from pydantic import AnyHttpUrl, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of the service. Times are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="WINNOW_", frozen=True)

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
