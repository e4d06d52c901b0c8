#!/usr/bin/env bash
# Makes the stubs and compiles main.go, with Debian's packages (debian-packages.txt beside this file) and no network:
#   examples/go/build.sh FOLDER && FOLDER/generate 127.0.0.1:50051 "What is 27 + 48?"
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "${1:?usage: build.sh FOLDER}"
out=$(cd "$1" && pwd)
module=$out/src/cadenza-example
mkdir -p "$module/gen"
cp "$here"/*.go "$module"

protoc -I "$here/../../protos" --go_out="$module/gen" --go_opt=paths=source_relative \
  --go-grpc_out="$module/gen" --go-grpc_opt=paths=source_relative cadenza/v1/types.proto cadenza/v1/generation.proto

# Debian keeps Go's libraries in /usr/share/gocode. In a module of your own: `go mod tidy && go build`.
GO111MODULE=off GOPATH="$out:/usr/share/gocode" go build -o "$out/generate" cadenza-example
