# docker build -t fsdpctl .
# docker run --rm --gpus all --ipc host -v "$PWD":/work fsdpctl fsdpctl train data.path=my_files/
FROM python:3.11
# Without GPUs: --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt .
WORKDIR /work
