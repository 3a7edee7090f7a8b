/* Stands in for libnvidia-ml.so.1, so that code which goes through the unmodified nvidia-ml-py can be tested without a GPU.
 *
 * FAKE_NVML_GPUS   how many GPUs (default 2)
 * FAKE_NVML_FAULT  one fault on GPU 1: ecc remap retired width throttle memory lost link recovery
 * FAKE_NVML_HANG   set: nvmlInit never returns, as with a driver that waits for a dead GPU
 * FAKE_NVML_NO_DRIVER  set: nvmlInit finds no driver
 * FAKE_NVML_STATE  a file, read anew at each call, with lines `GPU FIELD VALUE`; `hang` blocks a GPU's calls while it
 *                  stands there, `lost` takes the GPU away
 * FAKE_NVML_EVENTS a FIFO; a line `GPU XID` written to it is an event, and 79 takes the GPU away
 */
#include <fcntl.h>
#include <poll.h>
#include <time.h>
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

typedef struct { device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_data;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_info;

static device devices[64];
static int fallen[64];
static int count(void) { const char *e = getenv("FAKE_NVML_GPUS"); return e ? atoi(e) : 2; }
static int faulty(device *d, const char *what) {
  const char *e = getenv("FAKE_NVML_FAULT");
  return d->index == 1 && e && !strcmp(e, what);
}

/* The value that the state file gives this field of this GPU now, else `otherwise`. */
static unsigned long long value(device *d, const char *field, unsigned long long otherwise) {
  const char *path = getenv("FAKE_NVML_STATE");
  FILE *f = path ? fopen(path, "r") : NULL;
  char line[128], name[64];
  int gpu;
  unsigned long long v;
  while (f && fgets(line, sizeof line, f))
    if (sscanf(line, "%d %63s %llu", &gpu, name, &v) == 3 && gpu == d->index && !strcmp(name, field)) otherwise = v;
  if (f) fclose(f);
  return otherwise;
}
static int gone(device *d) {
  while (value(d, "hang", 0)) usleep(10000);
  return fallen[d->index] || faulty(d, "lost") || value(d, "lost", 0);
}

static int events = -1;
ret nvmlInitWithFlags(unsigned flags) {
  const char *fifo = getenv("FAKE_NVML_EVENTS");
  (void)flags;
  while (getenv("FAKE_NVML_HANG")) pause();
  if (fifo && events < 0) events = open(fifo, O_RDWR | O_NONBLOCK | O_CLOEXEC);
  return getenv("FAKE_NVML_NO_DRIVER") ? 9 : 0;
}
ret nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
ret nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(ret r) { (void)r; return "an error of the fake"; }
ret nvmlDeviceGetCount_v2(unsigned *n) { *n = count(); return 0; }
ret nvmlDeviceGetHandleByIndex_v2(unsigned i, device **d) {
  if ((int)i >= count() || i >= 64) return 2;
  devices[i].index = i;
  *d = &devices[i];
  return gone(*d) ? 15 : 0;
}
ret nvmlDeviceGetPciInfo_v3(device *d, pci_info *p) {
  memset(p, 0, sizeof *p);
  snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", 0x1a + d->index);
  return 0;
}
ret nvmlDeviceGetTotalEccErrors(device *d, int type, int counter, unsigned long long *v) {
  if (gone(d)) return 15;
  *v = value(d, type == 0 ? "ecc_corrected" : counter == 0 ? "ecc" : "ecc_ever", faulty(d, "ecc") ? 3 : 0);
  return 0;
}
ret nvmlDeviceGetRemappedRows(device *d, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
  *c = value(d, "remapped_corrected", 0);
  *u = value(d, "remapped", 0);
  *pending = value(d, "remap_pending", 0);
  *failed = value(d, "remap_failed", faulty(d, "remap"));
  return 0;
}
ret nvmlDeviceGetRetiredPagesPendingStatus(device *d, int *v) { *v = value(d, "retired_pending", faulty(d, "retired")); return 0; }
ret nvmlDeviceGetCurrPcieLinkWidth(device *d, unsigned *v) { *v = value(d, "width", faulty(d, "width") ? 8 : 16); return 0; }
ret nvmlDeviceGetMaxPcieLinkWidth(device *d, unsigned *v) { (void)d; *v = 16; return 0; }
ret nvmlDeviceGetCurrentClocksThrottleReasons(device *d, unsigned long long *v) {
  *v = value(d, "throttle", faulty(d, "throttle") ? 0x40 | 1 : 1);
  return 0;
}
ret nvmlDeviceGetMemoryInfo(device *d, memory *m) {
  m->total = 80ull << 30;
  m->used = value(d, "used", faulty(d, "memory") ? 40ull << 30 : 1ull << 28);
  m->free = m->total - m->used;
  return 0;
}
ret nvmlDeviceGetNvLinkState(device *d, unsigned link, unsigned *active) {
  if (link >= 4) return 3;
  *active = !((faulty(d, "link") || value(d, "link_down", 0)) && link == 2);
  return 0;
}
ret nvmlDeviceGetFieldValues(device *d, int n, field_value *v) {
  for (int i = 0; i < n; i++) {
    v[i].status = 0;
    v[i].value_type = 1;
    v[i].value.ui = value(d, "recovery", faulty(d, "recovery") ? 2 : 0);
  }
  return 0;
}
ret nvmlDeviceGetUUID(device *d, char *s, unsigned n) {
  snprintf(s, n, "GPU-00000000-0000-0000-0000-%012x", d->index);
  return 0;
}
ret nvmlDeviceGetPcieReplayCounter(device *d, unsigned *v) { *v = value(d, "replay", 0); return 0; }
ret nvmlDeviceGetTemperature(device *d, int sensor, unsigned *v) { (void)sensor; *v = value(d, "temperature", 40); return 0; }
ret nvmlDeviceGetRetiredPages(device *d, int cause, unsigned *n, unsigned long long *pages) {
  unsigned have = value(d, cause == 0 ? "retired_sbe" : "retired_dbe", 0), room = *n;
  *n = have;
  if (!pages) return have ? 7 : 0;
  for (unsigned i = 0; i < have && i < room; i++) pages[i] = i;
  return have > room ? 7 : 0;
}
ret nvmlDeviceGetNvLinkErrorCounter(device *d, unsigned link, int counter, unsigned long long *v) {
  if (link >= 4) return 3;
  *v = link == 1 ? value(d, counter == 0 ? "replay_errors" : counter == 1 ? "recovery_errors" : counter == 2 ? "crc_errors" : "-", 0) : 0;
  return 0;
}
ret nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *n, process_info *p) {
  unsigned pid = value(d, "pid", 0), room = *n;
  *n = pid ? 1 : 0;
  if (!pid) return 0;
  if (!room || !p) return 7;
  memset(p, 0, sizeof *p);
  p->pid = pid;
  return 0;
}
static int registered[64];
static char pending[256];
static int pending_bytes;
ret nvmlEventSetCreate(void **set) { static int the_set; *set = &the_set; return 0; }
ret nvmlEventSetFree(void *set) { (void)set; return 0; }
ret nvmlDeviceGetSupportedEventTypes(device *d, unsigned long long *types) { (void)d; *types = 8; return 0; }
ret nvmlDeviceRegisterEvents(device *d, unsigned long long types, void *set) {
  (void)set;
  if (gone(d)) return 15;
  registered[d->index] = types & 8;
  return 0;
}
static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}
ret nvmlEventSetWait_v2(void *set, event_data *e, unsigned ms) {
  double until = now_s() + ms / 1e3;
  (void)set;
  for (;;) {
    char *end = memchr(pending, '\n', pending_bytes);
    if (end) {
      int gpu, used = end - pending + 1;
      unsigned long long xid;
      int read_both = (*end = 0, sscanf(pending, "%d %llu", &gpu, &xid) == 2);
      memmove(pending, end + 1, pending_bytes -= used);
      if (!read_both || gpu < 0 || gpu >= count() || !registered[gpu]) continue;
      fallen[gpu] |= xid == 79;
      memset(e, 0, sizeof *e);
      e->device = &devices[gpu];
      e->type = 8;
      e->data = xid;
      e->gpu_instance = e->compute_instance = 0xFFFFFFFF;
      return 0;
    }
    if (now_s() >= until) return 10;
    struct pollfd p = {events, POLLIN, 0};
    if (poll(&p, events >= 0, (int)((until - now_s()) * 1e3) + 1) <= 0) return 10;
    int n = read(events, pending + pending_bytes, sizeof pending - pending_bytes);
    if (n > 0) pending_bytes += n;
  }
}
