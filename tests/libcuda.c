/* A stand-in for the CUDA driver: a card of compute capability FAKE_ARCH (90), and a log of what was called. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle;
static char text[1 << 16];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of text */
static handle current;
static int pushed_from;
static int quiet; /* log nothing: for timing */

struct config {
  unsigned grid[3], block[3], shared;
  handle stream;
  int *attributes;
  unsigned count;
};

static int say(const char *format, ...) {
  va_list values;
  if (quiet) return 0;
  va_start(values, format);
  pthread_mutex_lock(&lock);
  size_t used = strlen(text);
  vsnprintf(text + used, sizeof text - used, format, values);
  pthread_mutex_unlock(&lock);
  va_end(values);
  return 0;
}

static int environment(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value ? atoi(value) : otherwise;
}

const char *fake_log(void) { return text; }
void fake_clear(void) { text[0] = 0; }
void fake_quiet(int on) { quiet = on; }
void fake_current(handle context) { current = context; }

int cuInit(unsigned flags) { return flags; }
int cuGetExportTable(const void **table, const void *id) { return *table = NULL, 500; } /* NVRTC asks for one */
int cuDriverGetVersion(int *version) { return *version = environment("FAKE_DRIVER", 13000), 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int arch = environment("FAKE_ARCH", 90);
  *value = attribute == 75 ? arch / 10 : attribute == 76 ? arch % 10 : attribute == 97 ? 232448 : 132;
  return 0;
}
int cuDevicePrimaryCtxRetain(handle *context, int device) { return *context = (handle)(size_t)(1000 + device), 0; }
int cuCtxGetCurrent(handle *context) { return *context = current, 0; }
int cuCtxPushCurrent_v2(handle context) {
  pushed_from = (int)(size_t)current;
  current = context;
  return say("push %zu\n", (size_t)context);
}
int cuCtxPopCurrent_v2(handle *context) {
  *context = current;
  current = (handle)(size_t)pushed_from;
  return say("pop\n");
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  static int now = 0;
  int last = now;
  now = *mode, *mode = last;
  return say("mode %d\n", now);
}
int cuModuleLoadData(handle *module, const char *image) {
  if (memcmp(image, "\177ELF", 4)) return 200;
  return *module = (handle)7, say("load\n");
}
int cuModuleGetFunction(handle *function, handle module, const char *name) {
  if (module != (handle)7) return 400;
  return *function = strdup(name), say("get %s\n", name);
}
int cuFuncSetAttribute(handle function, int attribute, int value) {
  return say("set %s %d %d\n", (char *)function, attribute, value);
}
int cuLaunchKernelEx(const struct config *c, handle function, void **parameters, void **extra) {
  int early = 0;
  if (extra || c->count > 2) return 1;
  for (unsigned i = 0; i < c->count; i++) { /* 18 words each: id, padding, value; 6 is an early start, 4 a cluster */
    int id = c->attributes[18 * i], value = c->attributes[18 * i + 2];
    if ((id != 6 && id != 4) || value < 1 || (id == 6 && value != 1)) return 1;
    early |= id == 6;
  }
  return say(
      "%s %s %u,%u,%u %u,%u,%u %u on %zu first %d\n", early ? "early" : "launch", (char *)function, c->grid[0],
      c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, (size_t)c->stream, *(int *)parameters[0]);
}
int cuMemsetD8Async(size_t address, unsigned char value, size_t size, handle stream) {
  return say("zero %zu %u %zu on %zu\n", address, value, size, (size_t)stream);
}
int cuGetErrorString(int code, const char **message) { return *message = "as the test wants", 0; }

/* what Triton's launcher calls besides */
int cuCtxGetLimit(size_t *value, int limit) { return *value = 0, 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuCtxSetCurrent(handle context) { return current = context, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuStreamIsCapturing(handle stream, int *status) { return *status = 0, 0; }
int cuModuleUnload(handle module) { return 0; }
int cuDeviceGet(int *device, int index) { return *device = index, 0; }
int cuFuncGetAttribute(int *value, int attribute, handle function) { return *value = attribute ? 0 : 1024, 0; }
int cuFuncSetCacheConfig(handle function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *clusters, handle function, const struct config *c) { return *clusters = 0, 0; }
int cuPointerGetAttribute(size_t *value, int attribute, size_t address) { return *value = address, 0; }
int cuTensorMapEncodeTiled(void) { return 1; }
