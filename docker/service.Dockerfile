# The service: no torch, no SGLang. Build in the repository's root:
#   docker build --file docker/service.Dockerfile --tag winnow-service:0.1.0 .
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml constraints.txt ./
RUN pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt uv
ENV VIRTUAL_ENV=/opt/winnow \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy
RUN uv venv --python python3 "$VIRTUAL_ENV"
# In a layer of their own, which a change of the source leaves as it is.
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --constraint constraints.txt --requirement pyproject.toml
COPY README.md LICENSE ./
COPY kernels kernels
COPY sglang_ext sglang_ext
COPY service service
COPY evaluation evaluation
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --no-deps --build-constraint constraints.txt .

FROM python:3.11.14-slim-bookworm
LABEL org.opencontainers.image.title="winnow-service" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/winnow winnow \
    && install --directory --owner winnow --group winnow /var/lib/winnow
COPY --from=build /opt/winnow /opt/winnow
COPY docker/healthcheck.py /usr/local/bin/healthcheck
ENV PATH=/opt/winnow/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    WINNOW_STORE_URL=sqlite:////var/lib/winnow/control.db
WORKDIR /var/lib/winnow
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=11s --start-period=15s --retries=3 \
    CMD ["healthcheck", "http://127.0.0.1:8000/healthz"]
ENTRYPOINT ["winnow"]
CMD ["serve", "--host", "0.0.0.0"]
