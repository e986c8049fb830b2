#!/bin/sh
# Fuzzes one target for some seconds: run.sh gguf|myq [SECONDS]
set -eu

target=${1:?usage: run.sh gguf|myq [SECONDS]}
seconds=${2:-60}
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."

# libFuzzer's instrumentation is behind unstable compiler flags; this opens them on stable.
export RUSTC_BOOTSTRAP=1

cargo run --quiet -p myq-format --example fuzz_seeds -- "$here/corpus"
exec cargo fuzz run --sanitizer none "$target" -- \
    -max_total_time="$seconds" -max_len=20000 -timeout=10 -rss_limit_mb=1024 \
    -print_final_stats=1
