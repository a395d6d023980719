# make            build/prism (and the CUDA engine when nvcc is there)
# make quickstart install what is missing, build, train a small model, print a sample
# make test       install what is missing, build, run every check that needs no GPU
BUILD ?= build
CXX ?= g++
CXXFLAGS ?= -march=native
# Kernels at full optimisation; what is not hot compiles faster.
OPTIMISE ?= -O3
$(BUILD)/src/%.o $(BUILD)/data/%.o: OPTIMISE := $(OPTIMISE:-O3=-O2)
$(BUILD)/tests/%.o: OPTIMISE := $(OPTIMISE:-O3=-O1)
OPENMP ?= -fopenmp
NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))

# GCC 12 warns falsely of the undefined vectors of its AVX-512 headers, and of overlap inside std::string.
QUIET := $(if $(findstring g++,$(CXX)),-Wno-maybe-uninitialized -Wno-uninitialized -Wno-restrict)
FLAGS := -std=c++20 $(CXXFLAGS) $(OPENMP) -fno-math-errno -Wall -Wextra -Werror $(QUIET) -DEIGEN_DONT_PARALLELIZE \
         -I. -isystem /usr/include/eigen3 -MMD -MP
LIBS := -lsentencepiece_train -lsentencepiece -lzstd

ROOMS := tensor kernels autograd optim data src
ENGINE := $(filter-out src/main.cpp,$(wildcard $(ROOMS:=/*.cpp)))
TESTS := $(wildcard tests/*.cpp)
TESTS_GPU := $(wildcard tests/gpu/*.cpp)
CUDA_SOURCES := $(wildcard tensor/*.cu kernels/*.cu)

ifneq ($(NVCC),)
CUDA_HOME ?= $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
# The architectures to build for: the present card's, else 80 and 90. The last one also as PTX, for cards to come.
CUDA_ARCH ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .),80 90)
GENCODE := $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
           -gencode arch=compute_$(lastword $(CUDA_ARCH)),code=compute_$(lastword $(CUDA_ARCH))
NVCC_FLAGS := -std=c++20 -O3 --threads 2 $(GENCODE) -DPRISM_CUDA --expt-relaxed-constexpr -Xcompiler -Wall,-Wextra \
              -Werror all-warnings -I. -MMD -MP
FLAGS += -DPRISM_CUDA
LIBS += -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcudart -lcublas
OBJECTS_CUDA := $(CUDA_SOURCES:%.cu=$(BUILD)/%.cu.o)
endif

ifdef PORTABLE
LDFLAGS += -Wl,-rpath,'$$ORIGIN/lib',--disable-new-dtags
endif

# The PyTorch files that `prism export` writes, as strings of C++.
EXPORTED := tests/reference/prism_twin.py src/modeling_prism.py
$(BUILD)/exported.inc: $(EXPORTED)
	@mkdir -p $(@D)
	for f in $^; do printf '{"%s", R"python(' $$(basename $$f); cat $$f; printf ')python"},\n'; done >$@
$(BUILD)/src/cmd_export.o: $(BUILD)/exported.inc
$(BUILD)/src/cmd_export.o: FLAGS += -I$(BUILD)

OBJECTS := $(ENGINE:%.cpp=$(BUILD)/%.o) $(OBJECTS_CUDA)

.PHONY: all
all: $(BUILD)/prism
ifeq ($(NVCC),)
	@echo "nvcc not found: built the CPU engine only"
endif

$(BUILD)/prism: $(BUILD)/src/main.o $(OBJECTS)
	$(CXX) $(FLAGS) $(LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/run-tests: $(TESTS:%.cpp=$(BUILD)/%.o) $(OBJECTS)
	$(CXX) $(FLAGS) -o $@ $^ $(LIBS)

$(BUILD)/run-gpu-tests: $(BUILD)/tests/main.o $(TESTS_GPU:%.cpp=$(BUILD)/%.o) $(OBJECTS)
	$(CXX) $(FLAGS) -o $@ $^ $(LIBS)

$(BUILD)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) $(OPTIMISE) -c -o $@ $<

$(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -c -o $@ $<

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# --- checks

SOURCES = $(wildcard $(foreach r,$(ROOMS) tests tests/gpu tests/fuzz,$(r)/*.h $(r)/*.cpp $(r)/*.cu $(r)/*.cuh))

.PHONY: test
test: deps
	$(MAKE) $(BUILD)/prism $(BUILD)/run-tests
	BUILD=$(BUILD) bash tests/run.sh

.PHONY: test-gpu
test-gpu:
	$(MAKE) $(BUILD)/prism $(BUILD)/run-gpu-tests
	BUILD=$(BUILD) bash tests/gpu/run.sh

.PHONY: gradcheck bench
gradcheck bench: all
	$(BUILD)/prism $@

# Address and undefined-behaviour sanitizers over the whole suite.
.PHONY: asan
asan:
	$(MAKE) BUILD=$(BUILD)/asan NVCC= OPENMP= OPTIMISE=-O1 CXXFLAGS="-g -march=native -fsanitize=address,undefined -fno-sanitize-recover" \
	  $(BUILD)/asan/prism $(BUILD)/asan/run-tests
	ASAN_OPTIONS=detect_leaks=1 $(BUILD)/asan/run-tests

# Each fuzz target for FUZZ_SECONDS, from its seeds and what earlier runs kept; stops at the first crash.
FUZZ_SECONDS ?= 60
FUZZERS := $(patsubst tests/fuzz/fuzz_%.cpp,%,$(wildcard tests/fuzz/fuzz_*.cpp))
FUZZED := data/dataset.cpp data/shards.cpp data/text.cpp data/tokenizer.cpp src/config.cpp src/files.cpp \
          src/safetensors.cpp tensor/device.cpp
$(BUILD)/fuzz_%: $(BUILD)/tests/fuzz/fuzz_%.o $(FUZZED:%.cpp=$(BUILD)/%.o)
	$(CXX) $(FLAGS) -fsanitize=fuzzer -o $@ $^ $(LIBS)
.PHONY: fuzz
fuzz:
	@echo 'extern "C" int LLVMFuzzerTestOneInput() { return 0; }' | clang++ -fsanitize=fuzzer -x c++ -o /dev/null - 2>/dev/null || \
	  { echo "fuzz: needs clang++ with libFuzzer: apt-get install clang libclang-rt-dev (or libclang-rt-VERSION-dev)"; exit 1; }
	$(MAKE) BUILD=$(BUILD)/fuzz CXX=clang++ NVCC= OPENMP= QUIET= OPTIMISE=-O1 \
	  CXXFLAGS="-g -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover" $(FUZZERS:%=$(BUILD)/fuzz/fuzz_%)
	@for f in $(FUZZERS); do mkdir -p $(BUILD)/fuzz/corpus/$$f && \
	  $(BUILD)/fuzz/fuzz_$$f -max_total_time=$(FUZZ_SECONDS) -max_len=1024 -timeout=20 -print_final_stats=1 \
	    -artifact_prefix=$(BUILD)/fuzz/$$f- $(BUILD)/fuzz/corpus/$$f tests/fuzz/seeds/$$f >$(BUILD)/fuzz/$$f.log 2>&1 || \
	    { tail -n 60 $(BUILD)/fuzz/$$f.log; exit 1; }; \
	  awk -v f=$$f '/executed_units/ { print "fuzz " f ": " $$2 " inputs, no crash" }' $(BUILD)/fuzz/$$f.log; done

# Includes point one way: src -> optim, data, autograd -> kernels -> tensor.
.PHONY: check-layers
check-layers:
	@! grep -nE '#include "(kernels|autograd|optim|data|src|tests)/' tensor/* /dev/null
	@! grep -nE '#include "(autograd|optim|data|src|tests)/' kernels/* /dev/null
	@! grep -nE '#include "(optim|data|src|tests)/' autograd/* /dev/null
	@! grep -nE '#include "(autograd|data|src|tests)/' optim/* /dev/null
	@! grep -nE '#include "(autograd|optim|kernels|src|tests)/' data/* /dev/null
	@! grep -nE '#include "tests/' src/* /dev/null
	@! grep -nE '^ *# *if.*(CUDA)' $(filter-out tensor/dispatch.h tensor/dtype.h,$(SOURCES)) /dev/null
	@echo "layers: includes point one way"

.PHONY: format check-format
format:
	clang-format -i $(SOURCES)
check-format:
	@clang-format --dry-run --Werror $(SOURCES) && echo "format: clean"

# Lines of code and comment in each room (blank ones left out), and the files over 500 lines.
.PHONY: loc
loc:
	@for room in $(ROOMS); do printf '%-9s %6d\n' $$room $$(cat $$room/*.h $$room/*.cpp $$room/*.cu $$room/*.cuh $$room/*.html 2>/dev/null | grep -c .); done
	@printf '%-9s %6d\n' engine $$(cat $(foreach r,$(ROOMS),$(wildcard $(r)/*.h $(r)/*.cpp $(r)/*.cu $(r)/*.cuh $(r)/*.html)) | grep -c .)
	@wc -l $(SOURCES) | awk '$$2 != "total" && $$1 > 500 { print "over 500 lines: " $$2, $$1 }'

# A folder that runs on another x86-64 Linux (of the last ten years' processors): the program, and its libraries beside it. The
# driver and the C library are that machine's own.
.PHONY: portable
portable:
	$(MAKE) BUILD=$(BUILD)/portable-objects CXXFLAGS=-march=x86-64-v3 CUDA_ARCH="$(or $(PORTABLE_ARCH),80 90)" \
	  PORTABLE=1 $(BUILD)/portable-objects/prism
	rm -rf $(BUILD)/portable && mkdir -p $(BUILD)/portable/lib
	cp $(BUILD)/portable-objects/prism $(BUILD)/portable/
	ldd $(BUILD)/portable/prism | awk '/=> \// { print $$3 }' | grep -vE '/(libc|libm|libdl|librt|libpthread)\.so' | \
	  xargs -I{} cp -L {} $(BUILD)/portable/lib/
	@echo "$(BUILD)/portable: copy the folder, run ./prism --help"

.PHONY: clean
clean:
	rm -rf $(BUILD)

# --- set-up

PACKAGES := g++ make git libeigen3-dev libcli11-dev doctest-dev nlohmann-json3-dev libsentencepiece-dev libzstd-dev clang-format

# Installs what is missing on Debian and Ubuntu; elsewhere says what is needed and stops.
.PHONY: deps
deps:
	@bash tests/deps.sh $(PACKAGES)

# The main job, from nothing: trains a small model on this source tree, compares it with n-gram models, prints a sample.
QUICKSTART_STEPS ?= 500
.PHONY: quickstart
quickstart: deps
	$(MAKE) all
	rm -rf runs/quickstart
	$(BUILD)/prism train --preset tiny --device cpu --steps $(QUICKSTART_STEPS) --ngrams --out runs/quickstart \
	  --data README.md Makefile $(ROOMS) tests/*.cpp tests/*.h tests/reference tests/peers
	@echo "--- a sample:"
	@$(BUILD)/prism generate --model runs/quickstart --device cpu --prompt 'template <class T>' --tokens 300 --seed 1
	@echo "--- runs/quickstart/: config.json, model.safetensors, log.jsonl, loss.svg"
