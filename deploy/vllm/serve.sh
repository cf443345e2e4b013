#!/bin/sh
# Starts vLLM with the model that $MODEL names, as this project needs it: tools on, with the parsers of the model's family.
# LOCAL2_VLLM_TOOL_PARSER and LOCAL2_VLLM_REASONING_PARSER name others (`none`: none), LOCAL2_VLLM_ARGS adds arguments.
set -eu
name=$(printf %s "${MODEL##*/}" | tr A-Z a-z)
# Thinking is told apart only by the parser of a model that thinks; with another one all of the answer could count as thinking.
case $name in
*gemma-4*) tools=gemma4 thinks=gemma4 ;;
*gpt-oss*) tools=openai thinks=openai_gptoss ;;
*qwen3-coder*) tools=qwen3_coder thinks=none ;;
*qwen3*instruct*) tools=hermes thinks=none ;;
*qwen3*) tools=hermes thinks=qwen3 ;;
*qwen2.5* | *hermes*) tools=hermes thinks=none ;;
*llama-3* | *llama3*) tools=llama3_json thinks=none ;;
*magistral*) tools=mistral thinks=mistral ;;
*mistral* | *ministral* | *devstral*) tools=mistral thinks=none ;;
*granite*) tools=granite thinks=none ;;
*) tools='' thinks=none ;;
esac
tools=${LOCAL2_VLLM_TOOL_PARSER:-$tools}
thinks=${LOCAL2_VLLM_REASONING_PARSER:-$thinks}
if [ -z "$tools" ]; then
	echo "Which tool parser $MODEL needs is not known here: set LOCAL2_VLLM_TOOL_PARSER in .env to the one that" \
		"docs.vllm.ai names for it (features/tool_calling), or to none: it answers then without searching." >&2
	exit 1
fi
set -- --host 0.0.0.0 --port 8000 --max-model-len "${LOCAL2_NUM_CTX:-32000}"
[ "$tools" = none ] || set -- "$@" --enable-auto-tool-choice --tool-call-parser "$tools"
[ "$thinks" = none ] || set -- "$@" --reasoning-parser "$thinks"
# Arguments are words of it, hence without quotes.
# shellcheck disable=SC2086
exec vllm serve "$MODEL" "$@" ${LOCAL2_VLLM_ARGS:-}
