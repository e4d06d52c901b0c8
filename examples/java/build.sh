#!/usr/bin/env bash
# Makes the stubs and compiles Generate.java, with Debian's packages (debian-packages.txt beside this file) and no network:
#   examples/java/build.sh FOLDER && java -cp "$(cat FOLDER/classpath)" Generate 127.0.0.1:50051 "What is 27 + 48?"
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: build.sh FOLDER}
mkdir -p "$out/stubs" "$out/classes"
out=$(cd "$out" && pwd)

protoc -I "$here/../../protos" --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
  --java_out="$out/stubs" --grpc-java_out="$out/stubs" cadenza/v1/types.proto cadenza/v1/generation.proto

jars=$(printf '/usr/share/java/%s.jar:' grpc-{api,context,core,netty,protobuf,protobuf-lite,stub} guava jsr305 protobuf \
  proto-google-common-protos geronimo-annotation-1.3-spec perfmark-api \
  netty-{buffer,codec,codec-http,codec-http2,common,handler,resolver,transport})
find "$out/stubs" -name '*.java' -print0 | xargs -0 javac -nowarn -cp "$jars" -d "$out/classes" "$here/Generate.java"
echo "$out/classes:$jars" >"$out/classpath"
