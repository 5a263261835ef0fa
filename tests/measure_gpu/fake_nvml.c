/* A stand-in for NVIDIA's management library: fixed readings; $FAKE_NVML_OTHER is the number of another process at work, $FAKE_NVML_MODE
 * the compute mode. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Process;
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.159.04", size); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **d) { *d = (void *)1; return strncmp(uuid, "GPU-00010203-0405", 17) ? 6 : 0; }
int nvmlDeviceGetClockInfo(void *d, int which, unsigned *mhz) { *mhz = which == 1 ? 2520 : 10501; return 0; }
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *c) { *c = 61; return 0; }
int nvmlDeviceGetComputeMode(void *d, unsigned *mode) { *mode = getenv("FAKE_NVML_MODE") ? atoi(getenv("FAKE_NVML_MODE")) : 0; return 0; }
int nvmlDeviceGetPersistenceMode(void *d, unsigned *on) { *on = 1; return 0; }
int nvmlDeviceGetPowerUsage(void *d, unsigned *mw) { *mw = 310500; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *r) {
  *r = getenv("FAKE_NVML_HOT") ? 0x40 : 0x4; /* hardware thermal; the power cap, which is no disturbance */
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, Process *p) {
  const char *other = getenv("FAKE_NVML_OTHER");
  unsigned room = *n;
  *n = 0;
  if (room < 2) return 7;
  p[(*n)++].pid = getpid();
  if (other) p[(*n)++].pid = atoi(other);
  return 0;
}
