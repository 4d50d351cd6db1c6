# Images of gateway and worker; the gateway's has no torch. docker-compose.yml builds both.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The versions that the tests ran with.
RUN sed -e '/--hash/d' -e 's/ \\$//' requirements/lock.txt > /constraints.txt \
  && pip wheel --no-cache-dir --no-deps --wheel-dir /wheels --constraint /constraints.txt .

FROM python:3.11-slim AS service
RUN useradd --create-home --uid 10001 sluicegate && install -d -o sluicegate /data /models
COPY --from=build /wheels /wheels
COPY --from=build /constraints.txt /constraints.txt
ENV SLUICEGATE_DATA=/data SLUICEGATE_HOME=/models PYTHONUNBUFFERED=1
VOLUME ["/data", "/models"]

FROM service AS gateway
RUN pip install --no-cache-dir --constraint /constraints.txt "$(ls /wheels/sluicegate-*.whl)[gateway]"
USER sluicegate
EXPOSE 8080
CMD ["sluicegate", "gateway", "--host", "0.0.0.0", "--port", "8080"]

FROM service AS worker
COPY requirements/torch.txt /torch.txt
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple -r /torch.txt \
  && pip install --no-cache-dir --constraint /constraints.txt "$(ls /wheels/sluicegate-*.whl)[worker]"
USER sluicegate
CMD ["sluicegate", "worker"]
