// Attention on the tensor cores: bf16, heads of width 64 or 128, rows on 16 bytes.
#pragma once

#include "kernels/attention.h"

namespace prism::cuda {

// What attention.h's functions compute, without the cache's update. False, and nothing done, when these
// kernels don't cover the problem's shape or are not chosen.
bool fast_attention_forward(const AttentionArgs<bf16>& args);
bool fast_attention_backward(const AttentionArgs<bf16>& args, const AttentionGrads<bf16>& grads);

}  // namespace prism::cuda
