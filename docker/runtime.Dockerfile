# SGLang with Winnow's plugins, for CPUs or for CUDA. Build in the repository's root:
#   docker build --file docker/runtime.Dockerfile --build-arg VARIANT=cpu --tag winnow-runtime:0.1.0-cpu .
#   docker build --file docker/runtime.Dockerfile --build-arg VARIANT=cuda --tag winnow-runtime:0.1.0-cuda .
ARG VARIANT=cpu

FROM python:3.11.14-slim-bookworm AS cpu
# Without a visible GPU, Winnow's platform plugin takes over.
ENV CUDA_VISIBLE_DEVICES=""

# With nvcc and a C++ compiler: FlashInfer and Triton compile kernels when they first need them.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${VARIANT} AS build
WORKDIR /source
COPY pyproject.toml constraints.txt ./
RUN python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt uv
ENV PATH=/opt/uv/bin:$PATH \
    VIRTUAL_ENV=/opt/winnow \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy
RUN uv venv --python python3 "$VIRTUAL_ENV"
# In a layer of their own, which a change of the source leaves as it is.
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --constraint constraints.txt --requirement pyproject.toml --extra runtime
COPY README.md LICENSE ./
COPY kernels kernels
COPY sglang_ext sglang_ext
COPY service service
COPY evaluation evaluation
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --no-deps --build-constraint constraints.txt .

FROM ${VARIANT}
LABEL org.opencontainers.image.title="winnow-runtime" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --create-home winnow
COPY --from=build /opt/winnow /opt/winnow
COPY docker/healthcheck.py /usr/local/bin/healthcheck
# SGLang's own /health generates a token, and says "unhealthy" while a long prompt is being read on a CPU.
ENV PATH=/opt/winnow/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false
WORKDIR /home/winnow
USER 10001:10001
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=11s --start-period=30m --start-interval=2s --retries=6 \
    CMD ["healthcheck", "http://127.0.0.1:30000/health"]
# Listens on loopback unless the arguments say otherwise.
ENTRYPOINT ["python", "-m", "sglang.launch_server", "--uvicorn-access-log-exclude-prefixes", "/health", "/metrics"]
