# Waits until this pod's vLLM answers at KVTIER_VLLM_URL, then for `kvtier ready`, READY_TIMEOUT_S at most, and makes
# the file $1, for which the readiness probe looks.
trap 'exit 0' TERM INT
is_up='import os, urllib.request as http; http.urlopen(os.environ["KVTIER_VLLM_URL"] + "/health", timeout=5)'
until python3 -c "$is_up" 2>/dev/null; do
  sleep 2 & wait $!
done
kvtier ready --timeout "$READY_TIMEOUT_S" & wait $! || echo "traffic comes all the same" >&2
touch "$1"
while :; do
  sleep 3600 & wait $!
done
