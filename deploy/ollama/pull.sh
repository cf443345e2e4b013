#!/bin/sh
# Downloads the models that $MODELS names, as far as they are not there yet; with progress, a line per five per cent.
# It runs a server of its own for that, on the model server's folder: that one has no way out to the network.
set -eu
attempts=${ATTEMPTS:-5}
log=${TMPDIR:-/tmp}/serve.log

ollama serve >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true' EXIT
trap 'exit 143' TERM INT
until ollama list >/dev/null 2>&1; do
	kill -0 "$server" 2>/dev/null || { cat "$log" >&2; exit 1; }
	sleep 0.2
done

here() { ollama show "$1" >/dev/null 2>&1; }

# What is painted over and over in a terminal as lines of a log: each message once, each five per cent once.
progress() {
	shown='|'
	tr '\r' '\n' |
		LC_ALL=C sed -u -e 's/\x1b\[[0-9]*[AG]/\n/g' -e 's/\x1b\[[0-9;?]*[A-Za-z]//g' -e 's/\xe2\xa0[\x80-\xbf]//g' |
		while IFS= read -r line; do
			case $line in *%*) line=${line%%\%*}% ;; esac
			line=${line%"${line##*[! ]}"}
			case $line in '' | *[12346789]%) continue ;; esac
			case $shown in *"|$line|"*) continue ;; esac
			shown="$shown$line|"
			echo "$1: $line"
		done
}

seen=' '
for model in $MODELS; do
	# the judge's name in earlier releases, which no library has
	case $model in prometheus | prometheus:7b) model=ggozad/prometheus2 ;; esac
	case $seen in *" $model "*) continue ;; esac
	seen="$seen$model "
	if here "$model"; then
		echo "$model is here"
		continue
	fi
	attempt=1
	# A pull that broke off goes on where it stopped.
	until ollama pull "$model" 2>&1 | progress "$model" && here "$model"; do
		[ "$attempt" -lt "$attempts" ] || { echo "$model could not be downloaded; see above" >&2; exit 1; }
		attempt=$((attempt + 1))
		sleep "${PAUSE:-5}"
	done
	echo "$model is here now"
done
