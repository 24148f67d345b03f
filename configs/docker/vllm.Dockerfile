# vLLM with the connector. From the repository's root, with a vLLM image of your platform:
#
#   docker build -f configs/docker/vllm.Dockerfile --build-arg VLLM_IMAGE=IMAGE:TAG -t vllm-kvtier:0.1.0 .

ARG VLLM_IMAGE
FROM ${VLLM_IMAGE}
COPY pyproject.toml README.md LICENSE /src/kvtier/
COPY kvtier /src/kvtier/kvtier
COPY connector /src/kvtier/connector
# As root, whatever user the image names; compose and Kubernetes name the one that it runs as.
USER root
RUN python3 -m pip install --no-cache-dir /src/kvtier
