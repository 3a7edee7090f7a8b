/* Stands in for libnvidia-ml.so.1, so that code which goes through the unmodified nvidia-ml-py can be tested without a GPU.
 *
 * FAKE_NVML_GPUS   how many GPUs (default 2)
 * FAKE_NVML_FAULT  one fault on GPU 1: ecc remap retired width throttle memory lost link recovery
 * FAKE_NVML_HANG   set: nvmlInit never returns, as with a driver that waits for a dead GPU
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int ret; /* 0 success, 2 invalid argument, 3 not supported, 15 GPU is lost */
typedef struct { int index; } device;
typedef struct {
  char legacy[16];
  unsigned domain, bus, dev, pci_id, subsystem;
  char bus_id[32];
} pci_info;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct {
  unsigned field, scope;
  long long timestamp, latency_us;
  int value_type, status;
  union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long ll; int i; unsigned short us; } value;
} field_value;

static device devices[64];
static int count(void) { const char *e = getenv("FAKE_NVML_GPUS"); return e ? atoi(e) : 2; }
static int faulty(device *d, const char *what) {
  const char *e = getenv("FAKE_NVML_FAULT");
  return d->index == 1 && e && !strcmp(e, what);
}

ret nvmlInitWithFlags(unsigned flags) { (void)flags; while (getenv("FAKE_NVML_HANG")) pause(); return 0; }
ret nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
ret nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(ret r) { (void)r; return "an error of the fake"; }
ret nvmlDeviceGetCount_v2(unsigned *n) { *n = count(); return 0; }
ret nvmlDeviceGetHandleByIndex_v2(unsigned i, device **d) {
  if ((int)i >= count() || i >= 64) return 2;
  devices[i].index = i;
  *d = &devices[i];
  return faulty(*d, "lost") ? 15 : 0;
}
ret nvmlDeviceGetPciInfo_v3(device *d, pci_info *p) {
  memset(p, 0, sizeof *p);
  snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", 0x1a + d->index);
  return 0;
}
ret nvmlDeviceGetTotalEccErrors(device *d, int type, int counter, unsigned long long *v) {
  (void)type; (void)counter;
  *v = faulty(d, "ecc") ? 3 : 0;
  return 0;
}
ret nvmlDeviceGetRemappedRows(device *d, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
  *c = *u = *pending = 0;
  *failed = faulty(d, "remap");
  return 0;
}
ret nvmlDeviceGetRetiredPagesPendingStatus(device *d, int *v) { *v = faulty(d, "retired"); return 0; }
ret nvmlDeviceGetCurrPcieLinkWidth(device *d, unsigned *v) { *v = faulty(d, "width") ? 8 : 16; return 0; }
ret nvmlDeviceGetMaxPcieLinkWidth(device *d, unsigned *v) { (void)d; *v = 16; return 0; }
ret nvmlDeviceGetCurrentClocksThrottleReasons(device *d, unsigned long long *v) { *v = faulty(d, "throttle") ? 0x40 | 1 : 1; return 0; }
ret nvmlDeviceGetMemoryInfo(device *d, memory *m) {
  m->total = 80ull << 30;
  m->used = faulty(d, "memory") ? 40ull << 30 : 1ull << 28;
  m->free = m->total - m->used;
  return 0;
}
ret nvmlDeviceGetNvLinkState(device *d, unsigned link, unsigned *active) {
  if (link >= 4) return 3;
  *active = !(faulty(d, "link") && link == 2);
  return 0;
}
ret nvmlDeviceGetFieldValues(device *d, int n, field_value *v) {
  for (int i = 0; i < n; i++) {
    v[i].status = 0;
    v[i].value_type = 1;
    v[i].value.ui = faulty(d, "recovery") ? 2 : 0;
  }
  return 0;
}
