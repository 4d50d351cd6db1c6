#define SLUICEGATE_OPS avx2_ops
#define SLUICEGATE_OPS_NAME "avx2"
#include "ops_impl.hpp"
