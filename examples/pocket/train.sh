#!/bin/sh
# Exports a step of a plan for ResNet20 within 6.5 MiB and trains it natively on the 8x8 digits.
set -e
cd "$(dirname "$0")/../.."
test -x native/build/pocket || make native
.venv/bin/python -m strata export --model resnet20 --budget 6.5MiB --data digits --verify --out runs/pocket
runs/pocket/pocket --epochs 3
