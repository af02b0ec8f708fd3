# One image for the webhook, libsync and the monitor; `make image` calls it with the version.
#
#   BASE        any glibc image with Python 3.11 or newer; no command is run in it
#   BUILD_BASE  the same Python with venv, pip and its headers; BASE unless it lacks them
#   PIP_*       pip's own settings, for a mirror; wheels in wheels/ of the context are taken first,
#               and with PIP_NO_INDEX=1 nothing else is
ARG BASE=python:3.12-slim-bookworm@sha256:a116514e19457bcb7af7efe9c3dd0b9b71e85b317694e7882a1c52aa15a78134
ARG BUILD_BASE=${BASE}

# ---- the libraries of the command, in a virtual environment without pip
FROM ${BUILD_BASE} AS dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS=/wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_PROGRESS_BAR=off
# The star lets the folder be absent.
COPY pyproject.toml wheels* /wheels/
# Compiled by hash, because not every builder keeps the times that pip's own .pyc files are checked by.
RUN set -eu; \
    python3 -m venv /opt/build; \
    python3 -m venv --without-pip /opt/isolator; \
    /opt/build/bin/python -c "import tomllib; \
p = tomllib.load(open('/wheels/pyproject.toml', 'rb')); \
build = [r for r in p['build-system']['requires'] if not r.startswith('nvidia-')]; \
open('/opt/build/build.txt', 'w').write('\n'.join([*build, 'wheel'])); \
open('/opt/build/run.txt', 'w').write('\n'.join(p['project']['dependencies']))"; \
    /opt/build/bin/pip install -q -r /opt/build/build.txt; \
    /opt/build/bin/pip --python /opt/isolator/bin/python install -q --no-compile -r /opt/build/run.txt; \
    find /opt/isolator -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +; \
    find /opt/isolator -type d -path '*/kubernetes/aio' -prune -exec rm -rf {} +; \
    rm -f /opt/isolator/bin/activate* /opt/isolator/bin/Activate*; \
    /opt/isolator/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/isolator/lib

# ---- this package: the library for both architectures, the extension for this one
FROM dependencies AS package
WORKDIR /src
COPY pyproject.toml setup.py LICENSE ./
COPY native native/
COPY isolator/__init__.py isolator/
# zig compiles the extension too, so the base needs no compiler; Debian splits Python's headers over /usr/include.
RUN set -eu; \
    export CC="/opt/build/bin/python -m ziglang cc -target $(uname -m)-linux-gnu.2.17"; \
    export LDSHARED="$CC -shared" CFLAGS="-idirafter /usr/include"; \
    export ZIG_GLOBAL_CACHE_DIR=/tmp/zig ZIG_LOCAL_CACHE_DIR=/tmp/zig; \
    /opt/build/bin/python -W ignore setup.py -q build_ext; \
    rm -rf /tmp/zig build/native/zig
COPY README.md ./
COPY isolator isolator/
RUN set -eu; \
    /opt/build/bin/pip wheel -q --no-deps --no-build-isolation -w /dist .; \
    /opt/build/bin/pip --python /opt/isolator/bin/python install -q --no-deps --no-compile \
        --prefix /out/opt/isolator /dist/*.whl; \
    /opt/isolator/bin/python -m compileall -q --invalidation-mode unchecked-hash -s /out -p / /out

FROM ${BASE}
COPY --from=dependencies /opt/isolator /opt/isolator
COPY --from=package /out/ /
# Two arenas are enough for a few threads and keep the idle size down.
ENV PATH=/opt/isolator/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 MALLOC_ARENA_MAX=2
USER 65532:65532
ENTRYPOINT ["isolator"]
CMD ["--help"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kai-resource-isolator" \
      org.opencontainers.image.description="Hard GPU-memory quotas for containers that share a GPU, for KAI Scheduler" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
