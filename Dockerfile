# The library with studio, server and exports, for NVIDIA cards and CPUs: docs/guide/docker.md.
# A small image for CPUs: --build-arg BASE=ubuntu:24.04 --build-arg TORCH=https://download.pytorch.org/whl/cpu
ARG BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04
FROM ${BASE}

# g++ compiles the CPU kernels at the first run; Triton needs a C compiler and Python.h. Ubuntu's releases are its own.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

ARG TORCH=""
COPY constraints.txt setup.py pyproject.toml README.md LICENSE /src/
COPY hybrid_rlhf /src/hybrid_rlhf
COPY training /src/training
COPY inference /src/inference
WORKDIR /src
RUN PIP_EXTRA_INDEX_URL="${TORCH}" pip install --no-cache-dir --constraint constraints.txt ".[quantize,gguf,vision,report]" \
 && rm -rf build ./*.egg-info

# Ubuntu's image has a user of id 1000 already.
ARG UID=1000
RUN if id -nu "${UID}" >/dev/null 2>&1; then userdel --remove "$(id -nu "${UID}")"; fi \
 && useradd --create-home --uid "${UID}" user \
 && mkdir -p /work /home/user/.cache \
 && chown user:user /work /home/user/.cache
USER ${UID}
WORKDIR /work
VOLUME ["/work", "/home/user/.cache"]
EXPOSE 8090
# Without the token the studio refuses, which shows that it answers.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s --retries=3 \
  CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8090, timeout=4); c.request('GET', '/'); c.getresponse()"]
CMD ["hybrid-rlhf", "studio", "--outputs", "/work/outputs", "--host", "0.0.0.0", "--no_browser"]
