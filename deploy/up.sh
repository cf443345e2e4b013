#!/usr/bin/env bash
# `make up`: builds and starts the containers, with what this machine has and what .env names, and waits until all are healthy.
# Arguments go to `docker compose up`. The script writes its findings to the end of .env, in marked lines: plain `docker
# compose` then does the same. A line of the user's, or a variable, goes before. If its COMPOSE_FILE names no file for the
# GPU, the script adds the file of this machine. --find: find and write only.
set -euo pipefail
cd "$(dirname "$0")/.."
mark='# by make up'
dev=${DEV:-/dev} sys=${SYS:-/sys} cdi=${CDI:-/etc/cdi /var/run/cdi} localtime=${LOCALTIME:-/etc/localtime}

find_only=''
[ "${1:-}" != --find ] || { find_only=yes; shift; }

say() { echo "make up: $*"; }
warn() { echo "make up: $*" >&2; }
given() { [ -n "${!1:-}" ] || grep "^$1=." .env | grep -qv " $mark\$"; }
value() {
	local found
	found=$(sed -n "s/^$1=\(.*\)/\1/p" .env | tail -1)
	echo "${!1:-${found% "$mark"}}"
}
write() { # NAME VALUE: into .env, unless it is given
	given "$1" || echo "$1=$2 $mark" >>.env
}

# gpu, memory: the GPUs of this machine. file: their compose file beside compose.yaml, which itself reserves NVIDIA GPUs.
gpu='' file=compose.cpu.yaml memory=''
nvidia() {
	local said specs
	if command -v nvidia-smi >/dev/null; then
		if ! said=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>&1); then
			warn "nvidia-smi fails, so no GPU is used. It says: $(tail -1 <<<"$said")"
			return
		fi
		gpu=nvidia memory=$(awk '{ sum += $1 } END { printf "%.0f", sum * 1.048576 }' <<<"$said")
		say "$(grep -c . <<<"$said") NVIDIA GPU(s), $((memory / 1000)) GB"
	fi
	if docker info --format '{{json .Runtimes}}' 2>/dev/null | grep -q '"nvidia'; then
		gpu=nvidia file=''
		return
	fi
	# of Docker 28.3 and newer; before, the folders that it reads, when it reads any
	if docker info --format '{{json .DiscoveredDevices}}' 2>/dev/null | grep -q 'nvidia.com/gpu='; then
		gpu=nvidia file=compose.cdi.yaml
		return
	fi
	# shellcheck disable=SC2086
	specs=$(grep -ls 'nvidia.com/gpu' $(printf '%s/* ' $cdi) || true)
	if [ -n "$specs" ]; then
		gpu=nvidia
		if docker info --format '{{json .CDISpecDirs}}' 2>/dev/null | grep -q /; then
			file=compose.cdi.yaml
		else
			warn "$(head -1 <<<"$specs") describes an NVIDIA GPU, but Docker does not read it: put" \
				'{"features": {"cdi": true}} into /etc/docker/daemon.json, restart Docker, and make up again.'
		fi
	elif [ -n "$gpu" ]; then
		warn "Docker cannot give out the GPU: install NVIDIA's container toolkit, then" \
			"sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker, and make up again."
	fi
}
amd() {
	local card total=0 vram
	[ -e "$dev/kfd" ] || return 0
	for card in "$sys"/class/drm/card*/device; do
		[ -e "$card/mem_info_vram_total" ] && [ "$(cat "$card/vendor")" = 0x1002 ] || continue
		vram=$(cat "$card/mem_info_vram_total")
		# less is a processor's own graphics
		[ "$vram" -lt 4000000000 ] || total=$((total + vram))
	done
	[ "$total" -gt 0 ] || return 0
	gpu=amd file=compose.rocm.yaml memory=$((total / 1000000))
	say "AMD GPU(s), $((memory / 1000)) GB"
	write LOCAL2_RENDER_GROUP "$(stat -c %g "$dev/kfd")"
	write LOCAL2_VIDEO_GROUP "$(stat -c %g "$(ls -d "$dev"/dri/card* "$dev/kfd" 2>/dev/null | head -1)")"
}

umask 077
sed "/ $mark\$/d" .env >.env.found && mv .env.found .env
[ -z "$(tail -c 1 .env)" ] || echo >>.env
own=$(value COMPOSE_FILE) files=''
if [ -z "$own" ] && { given LOCAL2_OLLAMA_HOST || given LOCAL2_BASE_URL || [ "$(value LOCAL2_BACKEND)" = google_genai ]; }; then
	say 'a model server elsewhere: with compose.remote.yaml'
	files=compose.yaml:compose.remote.yaml
else
	nvidia
	[ -n "$gpu" ] || amd
	if [ -z "$own" ] || grep -Eq '(^|[:/])compose\.yaml(:|$)' <<<"$own" &&
		! grep -Eq 'compose\.(cpu|cdi|rocm|vllm|remote)\.yaml' <<<"$own"; then
		files=${own:-compose.yaml}${file:+:$file}
		[ -n "$gpu" ] || say 'no GPU found: the model runs on the CPU'
		[ -z "$file" ] || say "with $file${own:+, added to COMPOSE_FILE=$own}"
	else
		files=$own
		[[ "$own" != *compose.cpu.yaml* ]] || [ "$file" = compose.cpu.yaml ] ||
			warn "COMPOSE_FILE=$own leaves the GPU out: all answers come from the CPU. With it:" \
				"COMPOSE_FILE=$(sed "s/:[^:]*compose\.cpu\.yaml//${file:+; s/\$/:$file/}" <<<"$own")"
	fi
fi
# A variable goes before .env: the script changes it for its own commands only.
if [ -n "${COMPOSE_FILE:-}" ]; then
	export COMPOSE_FILE=$files
elif [ "$files" != "$own" ]; then
	echo "COMPOSE_FILE=$files $mark" >>.env
fi
case :$files: in
*:compose.remote.yaml:*) ;;
*)
	[ -z "$gpu" ] || write LOCAL2_GPU "$gpu"
	[ -z "$memory" ] || write LOCAL2_GPU_MEMORY "$memory"
	;;
esac
# Containers run in UTC unless TZ names the zone of this machine.
zone=$(readlink -f "$localtime" | sed -n 's|.*/zoneinfo/||p')
[ -z "$zone" ] || write TZ "$zone"
[ -z "$find_only" ] || exit 0

gateways=$(value LOCAL2_GATEWAY_REPLICAS)
[[ "$*" =~ gateway=([0-9]+) ]] && gateways=${BASH_REMATCH[1]}
if [ "${gateways:-1}" -gt 1 ] && [[ "$(value LOCAL2_API_PORT)" != *-* && ":$files:" != *:compose.proxy.yaml:* ]]; then
	warn "$gateways gateways cannot share one port: set LOCAL2_API_PORT=8765-8774 in .env (a port each, which changes" \
		'when one is restarted), or add compose.proxy.yaml to COMPOSE_FILE (one address for all).'
	exit 2
fi

docker compose build gateway memory
docker compose up --detach --wait "$@" || {
	status=$?
	warn 'not everything is up; what says why: docker compose ps --all, docker compose logs NAME'
	exit "$status"
}
docker compose ps --format '{{.Service}} {{.Ports}}' | sed -nE 's/^(gateway|proxy) (.*)->.*/Up: http:\/\/\2/p'
if given LOCAL2_ADMIN_KEY; then
	echo 'The admin key: LOCAL2_ADMIN_KEY of .env'
else
	echo 'The admin key: docker compose exec gateway cat /data/admin.key'
fi
echo 'Ask: docker compose exec gateway local2 ask "Hello"    What works: docker compose exec gateway local2 doctor'
