# vllm-router, which vLLM's project publishes as a package (ops/k8s/components/router, compose.fleet.yaml).
FROM python:3.11-slim-bookworm
RUN pip install --no-cache-dir vllm-router==0.1.17
USER 65534
EXPOSE 8000
ENTRYPOINT ["vllm-router", "--host=0.0.0.0", "--port=8000"]
