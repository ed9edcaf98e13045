# Trains and tests on CPUs; with --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 --build-arg EXTRAS=full,gpu on NVIDIA GPUs.
#   docker build -t omagd .
#   mkdir -p results
#   docker run --rm -v "$PWD/results:/home/omagd/results" omagd --config=qmix_fast with env_args.map_name=3m t_max=400000
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG EXTRAS=full

RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 python3-venv git \
    && rm -rf /var/lib/apt/lists/*
# The first user of most hosts has this number, too, so that files in mounted folders are theirs.
RUN (userdel --remove ubuntu 2>/dev/null || true) && useradd --create-home --uid 1000 omagd
USER omagd
ENV PATH=/home/omagd/venv/bin:$PATH
# Some builders give the folder of WORKDIR to root, and the installation writes into it.
RUN mkdir /home/omagd/code && python3 -m venv /home/omagd/venv
WORKDIR /home/omagd/code
COPY --chown=omagd . .
# Without a GPU the CPU's build of torch saves 3 GB.
RUN case ",$EXTRAS," in *,gpu,*) ;; *) export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ;; esac \
    && pip install --no-cache-dir -e ".[$EXTRAS]" -c constraints.txt

WORKDIR /home/omagd
ENTRYPOINT ["omagd"]
CMD ["--help"]
