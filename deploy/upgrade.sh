#!/usr/bin/env bash
# `make upgrade`: takes the containers from the version that runs to that of this checkout: backup, build, stop, copy of the
# volumes, start, a look whether everything is there; and back, with the data of before, when something of it fails.
#
#   git pull && make upgrade              what runs is the commit before the pull
#   make upgrade FROM=4376d24             what runs is this commit (or a folder with its checkout)
#   make upgrade ARGS=back                what was before the last upgrade, with the data of then
#
# Nothing is changed until everything is built. The copies, and the backup, stay in .upgrade and in volumes named
# ..._before until the next upgrade.
set -euo pipefail
umask 077
cd "$(dirname "$0")/.."
state=.upgrade
# Models and the files of deploy/ are fetched again, metrics are of no worth for it.
not_copied='_(ollama|vllm|config|prometheus|grafana)$'

say() { echo "upgrade: $*"; }
fail() { echo "upgrade: $*" >&2; exit 1; }
labelled() { docker "$@" --filter "label=com.docker.compose.project=$project"; }
in_gateway() { docker compose --project-name "$project" exec -T gateway "$@"; }
ready() { # SECONDS
	local until=$((SECONDS + $1))
	while [ "$SECONDS" -lt "$until" ]; do
		in_gateway python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8765/ready', timeout=10)" \
			>/dev/null 2>&1 && return
		sleep 2
	done
	return 1
}
counts() { gzip -cd "$1" | sed -n 's/^{"end":"\([a-z]*\)","count":\([0-9]*\).*/\1 \2/p'; }
copy() { # FROM TO: all files of a volume, in the place of those that are there
	docker run --rm --network none --user 0:0 --entrypoint sh --volume "$1:/from:ro" --volume "$2:/to" local2:before \
		-c 'find /to -mindepth 1 -delete && cp -a /from/. /to/'
}

back() {
	# shellcheck disable=SC1091
	. "$state/state"
	say "back to what ran before ($from)"
	docker compose --project-name "$project" down --remove-orphans
	local volume
	for volume in $volumes; do copy "${volume}_before" "$volume"; done
	(
		cd "$state/from"
		export COMPOSE_FILE=$files LOCAL2_TAG=before
		[ -z "$port" ] || export LOCAL2_API_PORT=$port
		# shellcheck disable=SC2086
		docker compose --project-name "$project" up --detach --wait --no-build $services
	)
	ready 300 || fail "what ran before is not ready either: docker compose --project-name $project logs"
	say "it runs again, with the data of before, from $PWD/$state/from; the backup is $backup"
	say "to stay there: git checkout $from; to try again: mend what failed, git checkout the new one, make upgrade FROM=$from"
}

project=$(docker compose config --format json | sed -n 's/^  "name": "\(.*\)",\{0,1\}$/\1/p' | head -1)
if [ "${1:-}" = back ]; then
	[ -e "$state/state" ] || fail 'there was no upgrade to go back from'
	back
	exit
fi

# ── what runs ───────────────────────────────────────────────────────────────────────────────────────────────
gateway=$(labelled ps --quiet --filter label=com.docker.compose.service=gateway | head -1)
memory=$(labelled ps --quiet --filter label=com.docker.compose.service=memory | head -1)
[ -n "$gateway" ] && [ -n "$memory" ] || fail "nothing of the project $project runs here that could be upgraded: make up"
ready 30 || fail 'what runs is not ready, so that nobody could tell afterwards what the upgrade has done: mend it first'
label() { docker inspect --format "{{index .Config.Labels \"com.docker.compose.project.$2\"}}" "$1"; }
files=$(label "$gateway" config_files | tr ',' '\n' | sed 's|.*/||' | paste -sd:)
services=$(labelled ps --format '{{.Label "com.docker.compose.service"}}' | sort -u | paste -sd' ')
volumes=$(labelled volume ls --quiet | grep -Ev "$not_copied" | paste -sd' ')
port=''
[ "$(labelled ps --quiet --filter label=com.docker.compose.service=gateway | wc -l)" -gt 1 ] ||
	port=$(docker port "$gateway" 8765/tcp 2>/dev/null | head -1 | sed 's/.*://')
from=${FROM:-$(git rev-parse --short ORIG_HEAD 2>/dev/null || true)}
[ -n "$from" ] || fail 'which version runs is not known: name its commit, make upgrade FROM=COMMIT'

rm -rf "$state/from"
mkdir -p "$state/from"
if [ -d "$from" ]; then
	tar -C "$from" --exclude=./.git --exclude=./.venv --exclude=./.local2 --exclude="./$state" -cf - . | tar -xf - -C "$state/from"
else
	git rev-parse --quiet --verify "$from^{commit}" >/dev/null || fail "$from is no commit here: git fetch, or name the folder"
	git archive "$from" | tar -xf - -C "$state/from"
fi
# its containers read it as their own users
chmod -R a+rX "$state/from" && chmod 711 "$state"
cp .env "$state/from/.env"
sed -i '/ # by make up$/d' "$state/from/.env"
docker tag "$(docker inspect --format '{{.Image}}' "$gateway")" local2:before
docker tag "$(docker inspect --format '{{.Image}}' "$memory")" local2-memory:before

# ── before anything is changed ──────────────────────────────────────────────────────────────────────────────
backup=$state/local2-$(date -u +%Y-%m-%dT%H%M%SZ).backup
say "a backup: $backup"
deploy/backup.sh "$backup"
make --no-print-directory env
deploy/up.sh --find
say 'the new images'
docker compose pull --ignore-buildable --policy missing --quiet
docker compose build gateway memory

# ── from here on there is something to go back to ───────────────────────────────────────────────────────────
{
	for name in project from files services volumes port backup; do printf '%s=%q\n' "$name" "${!name}"; done
} >"$state/state"
say 'stopping, and a copy of the volumes'
docker compose --project-name "$project" --profile '*' stop
for volume in $volumes; do
	docker volume create --label "local2.before=$project" "${volume}_before" >/dev/null
	copy "$volume" "${volume}_before"
done

arrived() {
	deploy/up.sh --remove-orphans || return 1
	ready 600 || { echo 'upgrade: the new version does not become ready' >&2; return 1; }
	# What is remembered may take a moment to be there again.
	local try new lost
	for try in 1 2 3 4 5 6; do
		new=$state/after.backup
		rm -f "$new"
		if deploy/backup.sh "$new"; then
			lost=$(join <(counts "$backup" | sort) <(counts "$new" | sort) | awk '$3 < $2 { print $1 ": " $3 " of " $2 }')
			lost+=$(join -v1 <(counts "$backup" | sort) <(counts "$new" | sort) | awk '{ print $1 ": none of " $2 }')
			rm -f "$new"
			[ -n "$lost" ] || return 0
		else
			lost='no backup can be made of it'
		fi
		[ "$try" = 6 ] || sleep 5
	done
	echo "upgrade: not everything is there: $lost" >&2
	return 1
}
if arrived; then
	say "done: everything that the backup has is there. Back to before: make upgrade ARGS=back; the backup is $backup"
else
	back
	exit 1
fi
