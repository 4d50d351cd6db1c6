#define SLUICEGATE_OPS portable_ops
#define SLUICEGATE_OPS_NAME "portable"
#include "ops_impl.hpp"
