# Services, one image each: `--target scheduler` and `--target gateway`, which hold no torch, and `--target executor`; and
# all with Ray in one, for the machines of a Ray cluster: `--target ray`, and with Ray Serve `--target ray-serve`.
#
# Plain syntax, for the classic builder of Docker 20.10. It runs every stage above the one it is asked for, so the
# stages without torch come first. docs/docker.md explains the build arguments.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS base
# The root file system is read-only when it runs: pip has compiled everything already.
ENV PATH=/opt/cadenza/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# ---------------------------------------------------------------- build: an empty environment, and what belongs in it

FROM base AS build
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
# Arguments end with their stage, variables do not. pip takes an empty one for none.
ENV PIP_CONSTRAINT=/build/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_FIND_LINKS=/build/wheels \
    PIP_INDEX_URL=$PIP_INDEX_URL \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_INDEX=$PIP_NO_INDEX \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY wheels/ wheels/
COPY pyproject.toml constraints.txt ./
# The requirements by themselves, so that a change of the code installs nothing again but the code.
RUN python -m venv --without-pip /opt/cadenza \
 && for extra in scheduler gateway executor; do \
      python -c "import sys, tomllib; project = tomllib.load(sys.stdin.buffer)['project']; \
print(*project['dependencies'], *project['optional-dependencies']['$extra'], sep='\n')" \
        < pyproject.toml > "$extra.txt" || exit 1; \
    done

FROM build AS wheel
COPY LICENSE README.md ./
COPY client/ client/
COPY cadenza_common/ cadenza_common/
COPY scheduler_svc/ scheduler_svc/
COPY executor_svc/ executor_svc/
COPY gateway_svc/ gateway_svc/
COPY cadenza_loadtest/ cadenza_loadtest/
COPY cadenza_launcher/ cadenza_launcher/
COPY cadenza_simulator/ cadenza_simulator/
COPY cadenza_cli/ cadenza_cli/
RUN pip wheel --quiet --no-deps --wheel-dir dist .

# ---------------------------------------------------------------- runtime: a user, and the folders that it may write to

FROM base AS runtime
RUN groupadd --gid 10001 cadenza \
 && useradd --uid 10001 --gid 10001 --no-log-init --create-home --shell /usr/sbin/nologin cadenza \
 && install -d -o 10001 -g 10001 /home/cadenza/.cache /home/cadenza/.cache/huggingface \
    /home/cadenza/.cache/cadenza /home/cadenza/.cache/cadenza/kernels /data
ENV HOME=/home/cadenza
WORKDIR /home/cadenza

# ---------------------------------------------------------------- scheduler

FROM build AS scheduler-build
RUN pip --python /opt/cadenza/bin/python install --quiet -r scheduler.txt
COPY --from=wheel /build/dist/ dist/
RUN pip --python /opt/cadenza/bin/python install --quiet --no-deps dist/*.whl

FROM runtime AS scheduler
COPY --from=scheduler-build /opt/cadenza/ /opt/cadenza/
USER 10001:10001
EXPOSE 50051
ENTRYPOINT ["python", "-m", "scheduler_svc"]

# ---------------------------------------------------------------- gateway

FROM build AS gateway-build
RUN pip --python /opt/cadenza/bin/python install --quiet -r gateway.txt
COPY --from=wheel /build/dist/ dist/
RUN pip --python /opt/cadenza/bin/python install --quiet --no-deps dist/*.whl

FROM runtime AS gateway
COPY --from=gateway-build /opt/cadenza/ /opt/cadenza/
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["python", "-m", "gateway_svc"]

# ---------------------------------------------------------------- executor

FROM build AS executor-build
# The build of torch, as the end of its version: +cpu, or nothing for the CUDA build of pip's default index, where an
# empty TORCH_INDEX leads. `===` compares the whole version: a +cpu wheel that lies in wheels/ is no CUDA build.
ARG TORCH_BUILD=+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Of the CUDA build, which requires one version of Triton: that of constraints.txt.
ARG CUDA_TORCH=2.11.0
RUN [ -n "$TORCH_BUILD" ] || sed -i "s/^torch==.*/torch==$CUDA_TORCH/" constraints.txt
RUN torch="torch===$(sed -n 's/^torch==//p' constraints.txt)$TORCH_BUILD" \
 && install="pip --python /opt/cadenza/bin/python install --quiet --no-deps" \
 && { $install --no-index "$torch" 2>/dev/null || $install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"; }
RUN pip --python /opt/cadenza/bin/python install --quiet -r executor.txt
COPY --from=wheel /build/dist/ dist/
RUN pip --python /opt/cadenza/bin/python install --quiet --no-deps dist/*.whl

FROM runtime AS executor
COPY --from=executor-build /opt/cadenza/ /opt/cadenza/
USER 10001:10001
EXPOSE 50052
ENTRYPOINT ["python", "-m", "executor_svc"]

# ---------------------------------------------------------------- both services, the command line, and Ray

FROM executor-build AS ray-build
RUN for extra in scheduler cli ray; do \
      python -c "import sys, tomllib; project = tomllib.load(sys.stdin.buffer)['project']; \
print(*project['optional-dependencies']['$extra'], sep='\n')" < pyproject.toml > "$extra.txt" || exit 1; \
    done \
 && pip --python /opt/cadenza/bin/python install --quiet -r scheduler.txt -r cli.txt -r ray.txt

FROM runtime AS ray
COPY --from=ray-build /opt/cadenza/ /opt/cadenza/
USER 10001:10001
EXPOSE 50051
ENTRYPOINT ["cadenza"]

# ---------------------------------------------------------------- the same with the gateway, and Ray Serve

FROM ray-build AS ray-serve-build
RUN for extra in gateway ray-serve; do \
      python -c "import sys, tomllib; project = tomllib.load(sys.stdin.buffer)['project']; \
print(*project['optional-dependencies']['$extra'], sep='\n')" < pyproject.toml > "$extra.txt" || exit 1; \
    done \
 && pip --python /opt/cadenza/bin/python install --quiet -r gateway.txt -r ray-serve.txt

FROM runtime AS ray-serve
COPY --from=ray-serve-build /opt/cadenza/ /opt/cadenza/
USER 10001:10001
EXPOSE 50051 8000
ENTRYPOINT ["cadenza"]
