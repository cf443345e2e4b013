#!/bin/sh
# Makes the Secret that the manifests expect, with fresh values: deploy/k8s/secrets.sh [NAMESPACE]. One that is there stays.
# For a Redis of your own set REDIS_URL, REDIS_WEB_SEARCH_URL, REDIS_WEB_FETCH_URL and REDIS_MCP_URL (all the same, if it knows one user
# only), REDIS_ADDRESS, REDIS_USER and REDIS_PASSWORD (the last three are KEDA's, which needs to read no entry: +info +xlen
# +xpending +xinfo|groups).
set -eu
namespace=${1:-local2}
fresh() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
password=$(fresh)
search_password=$(fresh)
fetch_password=$(fresh)
mcp_password=$(fresh)
kubectl get namespace "$namespace" >/dev/null 2>&1 || kubectl create namespace "$namespace"
kubectl --namespace "$namespace" create -f - <<YAML
apiVersion: v1
kind: Secret
metadata:
  name: local2
stringData:
  redis-url: ${REDIS_URL:-redis://core:$password@redis:6379/0}
  redis-web-search-url: ${REDIS_WEB_SEARCH_URL:-redis://web_search:$search_password@redis:6379/0}
  redis-web-fetch-url: ${REDIS_WEB_FETCH_URL:-redis://web_fetch:$fetch_password@redis:6379/0}
  redis-mcp-url: ${REDIS_MCP_URL:-redis://mcp:$mcp_password@redis:6379/0}
  redis-address: ${REDIS_ADDRESS:-redis.$namespace.svc:6379}
  scaler-user: ${REDIS_USER:-scaler}
  scaler-password: ${REDIS_PASSWORD:-$(fresh)}
  redis-password: $password
  redis-web-search-password: $search_password
  redis-web-fetch-password: $fetch_password
  redis-mcp-password: $mcp_password
  admin-key: ${LOCAL2_ADMIN_KEY:-l2_$(fresh)}
  searxng-secret: $(fresh)
YAML
