# make            build/prism (and the CUDA engine when nvcc is there)
# make quickstart install what is missing, build, train a small model, print a sample
# make test       install what is missing, build, run every check that needs no GPU
BUILD ?= build
CXX ?= g++
CXXFLAGS ?= -O3 -march=native
OPENMP ?= -fopenmp
NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))

# GCC 12 reports the undefined vectors of its own AVX-512 headers.
QUIET := $(if $(findstring g++,$(CXX)),-Wno-maybe-uninitialized)
FLAGS := -std=c++20 $(CXXFLAGS) $(OPENMP) -fno-math-errno -Wall -Wextra -Werror $(QUIET) -DEIGEN_DONT_PARALLELIZE \
         -I. -isystem /usr/include/eigen3 -MMD -MP
LIBS := -lsentencepiece -lzstd

ROOMS := tensor kernels autograd optim data src
ENGINE := $(filter-out src/main.cpp,$(wildcard $(ROOMS:=/*.cpp)))
TESTS := $(wildcard tests/*.cpp)
CUDA_SOURCES := $(wildcard tensor/*.cu kernels/*.cu)

ifneq ($(NVCC),)
ifneq ($(CUDA_SOURCES),)
CUDA_HOME ?= $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
# The architectures to build for: the present card's, else 80 and 90. The last one also as PTX, for cards to come.
CUDA_ARCH ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .),80 90)
GENCODE := $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
           -gencode arch=compute_$(lastword $(CUDA_ARCH)),code=compute_$(lastword $(CUDA_ARCH))
NVCC_FLAGS := -std=c++20 -O3 $(GENCODE) -DPRISM_CUDA --expt-relaxed-constexpr -Xcompiler -Wall,-Wextra -Werror all-warnings -I. -MMD -MP
FLAGS += -DPRISM_CUDA
LIBS += -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcudart -lcublas
OBJECTS_CUDA := $(CUDA_SOURCES:%.cu=$(BUILD)/%.cu.o)
endif
endif

OBJECTS := $(ENGINE:%.cpp=$(BUILD)/%.o) $(OBJECTS_CUDA)

.PHONY: all
all: $(BUILD)/prism

$(BUILD)/prism: $(BUILD)/src/main.o $(OBJECTS)
	$(CXX) $(FLAGS) -o $@ $^ $(LIBS)

$(BUILD)/run-tests: $(TESTS:%.cpp=$(BUILD)/%.o) $(OBJECTS)
	$(CXX) $(FLAGS) -o $@ $^ $(LIBS)

$(BUILD)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) -c -o $@ $<

$(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -c -o $@ $<

-include $(wildcard $(BUILD)/*/*.d)
