// The part of CUDA's driver that Triton calls, of an H200 that computes nothing: calls are checked and counted.

#include "cuda.h"
#include <stdio.h>
#include <string.h>

enum { MOST_SHARED_BYTES = 232448, MOST_THREADS = 1024, MOST_GRID_YZ = 65535, MOST_BOX = 256, ALIGNMENT = 16 };

static int anything;
static long num_launches, num_programmatic, num_descriptors;

long stub_launches(void) { return num_launches; }
long stub_programmatic(void) { return num_programmatic; }
long stub_descriptors(void) { return num_descriptors; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *at, CUfunction kernel, void **arguments, void **extra) {
  num_launches++;
  if (at->gridDimX < 1 || at->gridDimY < 1 || at->gridDimZ < 1 || at->gridDimY > MOST_GRID_YZ ||
      at->gridDimZ > MOST_GRID_YZ || at->blockDimX < 1 || at->blockDimX > MOST_THREADS ||
      at->sharedMemBytes > MOST_SHARED_BYTES) {
    fprintf(stderr, "%s: grid %u x %u x %u of %u threads, %u bytes shared\n", (char *)kernel, at->gridDimX, at->gridDimY,
            at->gridDimZ, at->blockDimX, at->sharedMemBytes);
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (unsigned i = 0; i < at->numAttrs; i++)
    if (at->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      num_programmatic += at->attrs[i].value.programmaticStreamSerializationAllowed == 1;
  return CUDA_SUCCESS;
}

// As the driver's manual has its limits, for descriptors that leave nothing out (rank 2, elements next to each other).
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  num_descriptors++;
  unsigned width = type == CU_TENSOR_MAP_DATA_TYPE_UINT8                                                   ? 1
                   : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ? 2
                                                                                                           : 0;
  unsigned span = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                  : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                  : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                         : MOST_BOX * width;
  unsigned bytes = box[0] * width;
  if (!width || rank != 2 || (unsigned long)address % ALIGNMENT || stride[0] % ALIGNMENT || size[0] < 1 || size[1] < 1 ||
      size[1] > 1UL << 32 || box[0] < 1 || box[1] < 1 || box[0] > MOST_BOX || box[1] > MOST_BOX || bytes % ALIGNMENT ||
      bytes > span) {
    fprintf(stderr, "descriptor of type %d, rank %u: %lu x %lu by %lu bytes, box %u x %u, swizzle %d\n", type, rank,
            size[1], size[0], stride[0], box[1], box[0], swizzle);
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = MOST_SHARED_BYTES; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = MOST_SHARED_BYTES + 1024; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1024;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? MOST_THREADS : 0;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { *text = "refused by the stub"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&anything; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 0; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)&anything; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}
