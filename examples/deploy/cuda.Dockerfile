# Untested: no container was built of it. docker build -f examples/deploy/cuda.Dockerfile -t foreword:cuda .
# Run it with --gpus all. Triton compiles its kernels at the first start, with the C compiler: keep /home/foreword/.triton.
FROM python:3.12-slim
RUN apt-get update && apt-get install --no-install-recommends -y gcc libc6-dev && rm -r /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir "/src[serve,json]" && rm -r /src
RUN useradd --create-home foreword
USER foreword
ENV FOREWORD_HOME=/home/foreword/models
VOLUME /home/foreword/models /home/foreword/.triton
EXPOSE 8000
HEALTHCHECK --start-period=600s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=3)"
ENTRYPOINT ["foreword", "serve", "--host", "0.0.0.0"]
