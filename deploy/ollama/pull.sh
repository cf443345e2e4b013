#!/bin/sh
# Downloads the models that $MODELS names, as far as they are not there yet, one after the other; says before how much comes
# and whether there is room, and while it comes a line per five per cent. One that cannot be had is named, and stops no other.
# It runs a server of its own for that, on the model server's folder: that one has no way out to the network.
#
# Status 1 when one is missing in the end, 0 with MISSING_IS_FINE. BESIDE: models that the same GPU has to hold besides.
# LOCAL2_GPU: nvidia or amd where the host has one, none to say nothing of it; else it is looked for. LOCAL2_GPU_GIVEN: the model
# server has it. LOCAL2_GPU_MEMORY: what it has, in MB.
set -eu
attempts=${ATTEMPTS:-5}
folder=${OLLAMA_MODELS:-$HOME/.ollama/models}
log=${TMPDIR:-/tmp}/serve.log
# A disk that is full to the last byte helps nobody, in bytes.
reserve=500000000

# ── the GPU ─────────────────────────────────────────────────────────────────────────────────────────────────

# nvidia, amd or nothing. A container sees the driver of its host; a processor's own graphics (little memory) do not count.
gpu() {
	case ${LOCAL2_GPU:-} in
	nvidia | amd) echo "$LOCAL2_GPU" && return ;;
	none) return ;;
	esac
	for card in "${ROOT:-}"/proc/driver/nvidia/gpus/*; do
		[ ! -e "$card" ] || { echo nvidia && return; }
	done
	for memory in "${ROOT:-}"/sys/class/drm/card*/device/mem_info_vram_total; do
		[ -e "$memory" ] && [ "$(cat "${memory%/*}/vendor")" = 0x1002 ] || continue
		[ "$(cat "$memory")" -lt 4000000000 ] || { echo amd && return; }
	done
}

case ${LOCAL2_GPU_GIVEN:+given}$(gpu) in
nvidia) which='NVIDIA' file='compose.yaml (compose.yaml:compose.cdi.yaml where Docker has no NVIDIA runtime)' ;;
amd) which='AMD' file='compose.yaml:compose.rocm.yaml' ;;
*) which='' ;;
esac
if [ -n "$which" ]; then
	echo "This host has an $which GPU, and the model server is not given it: all answers come from the CPU, slowly." \
		"make up mends it, or a line of .env: COMPOSE_FILE=$file. If it is meant: LOCAL2_GPU=none" >&2
fi

# ── sizes ───────────────────────────────────────────────────────────────────────────────────────────────────

in_gb() { awk -v bytes="$1" 'BEGIN { printf "%.1f GB", bytes / 1e9 }'; }

# Bytes that the registry has for a model, or nothing when it does not say. The image has openssl, and nothing that speaks HTTP.
registered() {
	path=${1%:*} tag=latest host=registry.ollama.ai
	case ${1##*/} in *:*) tag=${1##*:} ;; *) path=$1 ;; esac
	case $path in
	*.*/*/*) host=${path%%/*} path=${path#*/} ;;
	*/*) ;;
	*) path=library/$path ;;
	esac
	proxy=${HTTPS_PROXY:-${https_proxy:-}} proxy=${proxy#*://}
	printf 'GET /v2/%s/manifests/%s HTTP/1.0\r\nHost: %s\r\n\r\n' "$path" "$tag" "$host" |
		timeout 15 openssl s_client -quiet -verify_quiet -verify_return_error -servername "$host" \
			-connect "$host:443" ${proxy:+-proxy "${proxy%/}"} 2>/dev/null |
		tr ',{}' '\n\n\n' | awk -F: '/^ *"size" *:/ { sum += $2 } END { if (sum) printf "%.0f\n", sum }' || true
}

# Bytes of a model that is here, as the list says.
size_here() {
	case ${1##*/} in *:*) name=$1 ;; *) name=$1:latest ;; esac
	ollama list 2>/dev/null | awk -v name="$name" '
		BEGIN { unit["KB"] = 1e3; unit["MB"] = 1e6; unit["GB"] = 1e9; unit["TB"] = 1e12 }
		$1 == name { printf "%.0f\n", $3 * unit[$4] }'
}

# Bytes that can be written into the folder; what was begun counts, since it is gone on with.
room() {
	begun=$(du -ck "$folder"/blobs/*-partial 2>/dev/null | awk 'END { print $1 + 0 }')
	df -Pk "$folder" | awk -v begun="$begun" 'NR == 2 { printf "%.0f\n", ($4 + begun) * 1024 }'
}

# ── the download ────────────────────────────────────────────────────────────────────────────────────────────

mkdir -p "$folder"
ollama serve >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true' EXIT
trap 'exit 143' TERM INT
until ollama list >/dev/null 2>&1; do
	kill -0 "$server" 2>/dev/null || { cat "$log" >&2; [ -n "${MISSING_IS_FINE:-}" ]; exit; }
	sleep 0.2
done

here() { ollama show "$1" >/dev/null 2>&1; }

# What is painted over and over in a terminal as lines of a log: each message once, each five per cent once.
progress() {
	shown='|'
	tr '\r' '\n' |
		LC_ALL=C sed -u -e 's/\x1b\[[0-9]*[AG]/\n/g' -e 's/\x1b\[[0-9;?]*[A-Za-z]//g' -e 's/\xe2\xa0[\x80-\xbf]//g' |
		LC_ALL=C sed -u -e 's,%.*B/\([0-9.]* [KMGT]*B\).*,% of \1,' -e 's/%[^o]*$/%/' |
		while IFS= read -r line; do
			line=${line%"${line##*[! ]}"}
			case $line in '' | *[12346789]%*) continue ;; esac
			case $shown in *"|$line|"*) continue ;; esac
			shown="$shown$line|"
			echo "$1: $line"
		done
}

# A pull that broke off goes on where it stopped.
pull() {
	attempt=1
	until ollama pull "$1" 2>&1 | progress "$1" && here "$1"; do
		[ "$attempt" -lt "$attempts" ] || return 1
		attempt=$((attempt + 1))
		sleep "${PAUSE:-5}"
	done
}

seen=' ' wanted='' total=0 known=all
for model in $MODELS; do
	# the judge by another name, which the library has not
	case $model in prometheus | prometheus:7b) model=ggozad/prometheus2 ;; esac
	case $seen in *" $model "*) continue ;; esac
	seen="$seen$model "
	if here "$model"; then
		echo "$model is here"
		continue
	fi
	size=$(registered "$model")
	wanted="$wanted $model=${size:-0}"
	total=$((total + ${size:-0}))
	if [ -n "$size" ]; then
		echo "$model is to be downloaded: $(in_gb "$size")"
	else
		known=some
		echo "$model is to be downloaded; how large it is, its registry does not say"
	fi
done
if [ -n "$wanted" ]; then
	in_all="In all $(in_gb "$total") to come"
	[ "$known" = all ] || in_all='How much comes in all is not known'
	echo "$in_all; $(in_gb "$(room)") free in $folder"
fi

missing=''
for entry in $wanted; do
	model=${entry%=*} size=${entry##*=} free=$(room)
	if [ $((size + reserve)) -gt "$free" ]; then
		echo "$model is not downloaded: it takes $(in_gb "$size"), and $(in_gb "$free") are free in $folder." \
			"Make room there, or name a smaller model in .env." >&2
	elif pull "$model"; then
		echo "$model is here now"
		continue
	else
		echo "$model could not be downloaded; see above. What asks for it waits; everything else works without." >&2
	fi
	missing="$missing $model"
done

# ── what has to fit into the GPU together ───────────────────────────────────────────────────────────────────

together=0 counted=""
for model in ${BESIDE:-} $seen; do
	case " $counted " in *" $model "*) continue ;; esac
	counted="$counted $model"
	size=$(size_here "$model")
	together=$((together + ${size:-0}))
done
if [ -n "${LOCAL2_GPU_MEMORY:-}" ] && [ "$together" -gt $((LOCAL2_GPU_MEMORY * 1000000)) ]; then
	echo "The models take $(in_gb "$together") before any context, the GPU has $(in_gb $((LOCAL2_GPU_MEMORY * 1000000))):" \
		"they take turns in it, seconds each time. docs/growing.md has the arithmetic, compose.small.yaml leaves the judge out." >&2
fi

[ -z "$missing" ] || [ -n "${MISSING_IS_FINE:-}" ]
