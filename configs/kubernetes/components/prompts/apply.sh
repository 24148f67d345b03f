# Applies the prompts in the folder $1, which the kubelet fills from ConfigMaps: at the start, after each change, and
# again where that failed. The kubelet writes each change into a new folder, to which the link ..data leads then; so no
# apply reads half of a change.
trap 'exit 0' TERM INT
applied=
while :; do
  version=$(readlink "$1/..data")
  pause_s=${POLL_S:-10}
  if [ "$version" != "$applied" ]; then
    # vLLM's connector has the prompts computed (warm_url), while no user waits.
    kvtier apply -f "$1/$version" --prune --no-warm & wait $!
    case $? in
      0) applied=$version ;;
      3) ;; # no daemon answers yet
      *) pause_s=${RETRY_S:-60} ;;
    esac
  fi
  sleep "$pause_s" & wait $!
done
