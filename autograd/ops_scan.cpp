// The ops around the scan: the solver's writes and directions, the scan itself, and the loss.
#include "autograd/ops.h"
#include "kernels/elementwise.h"
#include "kernels/loss.h"
#include "kernels/matmul.h"
#include "kernels/scan.h"
