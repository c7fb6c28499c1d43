#!/usr/bin/env bash
# Everything that only a GPU can show, within eight minutes and without a network:  scripts/gpu_check.sh [OUTPUT.json]
# Needs torch, lightning and, for the comparison with Hugging Face's Llama, transformers; nothing is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHONPATH="$PWD" exec "${PYTHON:-python3}" scripts/gpu_check.py --output "${1:-gpu_check.json}"
