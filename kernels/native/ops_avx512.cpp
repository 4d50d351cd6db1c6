#define SLUICEGATE_OPS avx512_ops
#define SLUICEGATE_OPS_NAME "avx512"
#include "ops_impl.hpp"
