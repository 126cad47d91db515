# Untested: no container was built of it. docker build -f examples/deploy/cpu.Dockerfile -t foreword .
FROM python:3.12-slim
# The image is much smaller with an index of torch's CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=
COPY . /src
RUN pip install --no-cache-dir "/src[cpu,serve,json]" && rm -r /src
RUN useradd --create-home foreword
USER foreword
ENV FOREWORD_HOME=/home/foreword/models
VOLUME /home/foreword/models
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=3)"
ENTRYPOINT ["foreword", "serve", "--host", "0.0.0.0"]
