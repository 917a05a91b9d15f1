#define BATON_ISA portable
#include "kernels.h"
