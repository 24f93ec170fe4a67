/* A stand-in for libnvidia-ml.so.1, so that everything above NVML runs without an NVIDIA driver.
 *
 *   cc -shared -fPIC -O1 -o libnvidia-ml.so.1 standin_nvml.c -Wl,-soname,libnvidia-ml.so.1
 *   LD_LIBRARY_PATH=. STANDIN_NVML=gpus.txt python -c 'import pynvml; pynvml.nvmlInit(); ...'
 *
 * The machine is the text file that $STANDIN_NVML names; it is read anew at every call, so that a test can change the
 * load or lose a GPU under a running program. Without the variable the driver is "not loaded". A line is one of
 *
 *   driver 550.54.15 12040
 *   init 18                              nvmlInit answers this error (nvml.h, nvmlReturn_t)
 *   gpu NAME key=value ...               '_' in NAME is a blank
 *   mig NAME mem=4864 used=10 slices=1   an instance of the gpu line above, which is then in MIG mode
 *
 * Keys of a gpu: cc=8.0 mem= used= (MiB) util= memutil= (%) temp= power= limit= (W) nvlink= (GPUs with the same non-zero
 * number are joined) links= linkversion= (nvml.h) numa= pciegen= pciewidth= uuid= fan= proc=PID:MIB (repeatable; without
 * :MIB its memory is unknown) migmode=1 clock= (SM, MHz) throttle= (nvml.h, nvmlClocksThrottleReason*) xid= (one event, at
 * the first wait) ecc= (uncorrected errors) pcie= nvlinkkib= (bytes and KiB, counted up by this at every reading)
 *   lost=1    NVML_ERROR_GPU_IS_LOST at every call       dying=1  the handle is given out, then it is lost
 *   closed=1  NVML_ERROR_NO_PERMISSION for the handle    na=memory,cc,pcie,nvlink,numa,procs,uuid,util,temp,
 *                                                            power,clock,throttle,ecc,events,counters  not supported
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_GPUS 16
#define MAX_PROCESSES 8
#define MAX_INSTANCES 7
#define MIB (1024ull * 1024ull)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef int status;

enum {
    OK = 0, TIMEOUT = 10, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25
};

typedef struct { char name[96]; u64 mem, used; int slices; } Instance;

typedef struct {
    int index, cc_major, cc_minor, util, memutil, temp, power, limit, nvlink, links, linkversion, numa, pciegen, pciewidth;
    int lost, dying, closed, fan, migmode, processes, instances, clock, throttle, xid, ecc, pcie, nvlinkkib;
    u64 mem, used;
    char name[96], uuid[64], na[96];
    u32 pid[MAX_PROCESSES];
    u64 pid_mem[MAX_PROCESSES];
    Instance instance[MAX_INSTANCES];
} Gpu;

typedef struct { char legacy_bus_id[16]; u32 domain, bus, device, device_id, subsystem_id; char bus_id[32]; } PciInfo;
typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } ProcessInfo;
typedef struct { u32 version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { u32 version; int sensor, celsius; } TemperatureV;
typedef struct { u32 sms, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices; u64 mem_mb; } Attributes;

static Gpu gpus[MAX_GPUS];
static int count, sessions, init_answer, cuda_version;
static int watched[MAX_GPUS], told[MAX_GPUS];
static u64 counted[MAX_GPUS][4];
static char driver_version[80];

static void read_words(Gpu *gpu, Instance *instance) {
    char *word;
    while ((word = strtok(0, " \t\n"))) {
        char *value = strchr(word, '=');
        if (!value) continue;
        *value++ = 0;
        int number = atoi(value);
        if (instance) {
            if (!strcmp(word, "mem")) instance->mem = number;
            else if (!strcmp(word, "used")) instance->used = number;
            else if (!strcmp(word, "slices")) instance->slices = number;
        }
        else if (!strcmp(word, "cc")) sscanf(value, "%d.%d", &gpu->cc_major, &gpu->cc_minor);
        else if (!strcmp(word, "mem")) gpu->mem = number;
        else if (!strcmp(word, "used")) gpu->used = number;
        else if (!strcmp(word, "util")) gpu->util = number;
        else if (!strcmp(word, "memutil")) gpu->memutil = number;
        else if (!strcmp(word, "temp")) gpu->temp = number;
        else if (!strcmp(word, "power")) gpu->power = number;
        else if (!strcmp(word, "limit")) gpu->limit = number;
        else if (!strcmp(word, "nvlink")) gpu->nvlink = number;
        else if (!strcmp(word, "links")) gpu->links = number;
        else if (!strcmp(word, "linkversion")) gpu->linkversion = number;
        else if (!strcmp(word, "numa")) gpu->numa = number;
        else if (!strcmp(word, "pciegen")) gpu->pciegen = number;
        else if (!strcmp(word, "pciewidth")) gpu->pciewidth = number;
        else if (!strcmp(word, "fan")) gpu->fan = number;
        else if (!strcmp(word, "lost")) gpu->lost = number;
        else if (!strcmp(word, "dying")) gpu->dying = number;
        else if (!strcmp(word, "closed")) gpu->closed = number;
        else if (!strcmp(word, "migmode")) gpu->migmode = number;
        else if (!strcmp(word, "clock")) gpu->clock = number;
        else if (!strcmp(word, "throttle")) gpu->throttle = number;
        else if (!strcmp(word, "xid")) gpu->xid = number;
        else if (!strcmp(word, "ecc")) gpu->ecc = number;
        else if (!strcmp(word, "pcie")) gpu->pcie = number;
        else if (!strcmp(word, "nvlinkkib")) gpu->nvlinkkib = number;
        else if (!strcmp(word, "uuid")) snprintf(gpu->uuid, sizeof gpu->uuid, "%s", value);
        else if (!strcmp(word, "na")) snprintf(gpu->na, sizeof gpu->na, ",%s,", value);
        else if (!strcmp(word, "proc") && gpu->processes < MAX_PROCESSES) {
            char *mem = strchr(value, ':');
            gpu->pid[gpu->processes] = number;
            gpu->pid_mem[gpu->processes++] = mem ? atoll(mem + 1) * MIB : ~0ull;
        }
    }
}

static void read_name(char *name) {
    char *word = strtok(0, " \t\n");
    snprintf(name, 96, "%s", word ? word : "");
    for (; *name; name++) if (*name == '_') *name = ' ';
}

static void read_machine(void) {
    const char *path = getenv("STANDIN_NVML");
    FILE *file = path ? fopen(path, "r") : 0;
    char line[1024];
    count = init_answer = 0;
    strcpy(driver_version, "550.54.15");
    cuda_version = 12040;
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        char *word = strtok(line, " \t\n");
        if (!word || *word == '#') continue;
        if (!strcmp(word, "driver")) {
            char *driver = strtok(0, " \t\n"), *cuda = strtok(0, " \t\n");
            if (driver) snprintf(driver_version, sizeof driver_version, "%s", driver);
            if (cuda) cuda_version = atoi(cuda);
        } else if (!strcmp(word, "init")) {
            init_answer = atoi(strtok(0, " \t\n"));
        } else if (!strcmp(word, "gpu") && count < MAX_GPUS) {
            Gpu *gpu = &gpus[count];
            memset(gpu, 0, sizeof *gpu);
            gpu->index = count++;
            gpu->limit = 300, gpu->mem = 16384, gpu->cc_major = 7, gpu->fan = -1, gpu->pciewidth = 16, gpu->clock = 1410;
            snprintf(gpu->uuid, sizeof gpu->uuid, "GPU-%08x-fa4e-4e76-8000-%012x", 0xa0000000u + gpu->index * 0x1111, count);
            read_name(gpu->name);
            read_words(gpu, 0);
            if (!gpu->pciegen) gpu->pciegen = gpu->cc_major >= 8 ? 4 : 3;
            if (!gpu->linkversion) gpu->linkversion = gpu->cc_major >= 8 ? 5 : 3;
        } else if (!strcmp(word, "mig") && count && gpus[count - 1].instances < MAX_INSTANCES) {
            Gpu *gpu = &gpus[count - 1];
            Instance *instance = &gpu->instance[gpu->instances++];
            memset(instance, 0, sizeof *instance);
            gpu->migmode = 1;
            read_name(instance->name);
            read_words(0, instance);
        }
    }
    fclose(file);
}

/* A handle is index + 1; of a MIG instance 1000 * (index + 1) + slot + 1. */
static Gpu *gpu_of(void *handle, Instance **instance) {
    long number = (long)handle, index = (number >= 1000 ? number / 1000 : number) - 1, slot = number % 1000 - 1;
    if (index < 0 || index >= count) return 0;
    if (instance) *instance = number >= 1000 && slot < gpus[index].instances ? &gpus[index].instance[slot] : 0;
    return &gpus[index];
}

static status find(void *handle, Gpu **gpu, Instance **instance) {
    if (!sessions) return UNINITIALIZED;
    read_machine();
    if (!(*gpu = gpu_of(handle, instance))) return INVALID_ARGUMENT;
    return (*gpu)->lost || (*gpu)->dying ? GPU_IS_LOST : OK;
}

static int lacks(const Gpu *gpu, const char *what) {
    char key[32];
    snprintf(key, sizeof key, ",%s,", what);
    return strstr(gpu->na, key) != 0;
}

#define FIND \
    Gpu *gpu; Instance *instance; \
    status found = find(handle, &gpu, &instance); \
    if (found) return found; \
    (void)instance
#define FIND_WITH(what) FIND; if (lacks(gpu, what)) return NOT_SUPPORTED
#define ANSWER(function, type, what, expression) \
    status function(void *handle, type *answer) { FIND_WITH(what); *answer = (expression); return OK; }

/* Sessions and the driver */
status nvmlInitWithFlags(u32 flags) {
    (void)flags;
    if (!getenv("STANDIN_NVML")) return DRIVER_NOT_LOADED;
    read_machine();
    if (init_answer) return init_answer;
    sessions++;
    return OK;
}
status nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
status nvmlInit(void) { return nvmlInitWithFlags(0); }
status nvmlShutdown(void) { if (sessions) sessions--; return OK; }
const char *nvmlErrorString(status code) {
    switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Stand-in NVML error";
    }
}
status nvmlSystemGetDriverVersion(char *text, u32 size) { read_machine(); snprintf(text, size, "%s", driver_version); return OK; }
status nvmlSystemGetNVMLVersion(char *text, u32 size) { read_machine(); snprintf(text, size, "12.%s", driver_version); return OK; }
status nvmlSystemGetCudaDriverVersion(int *version) { read_machine(); *version = cuda_version; return OK; }
status nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* Handles */
status nvmlDeviceGetCount_v2(u32 *answer) { if (!sessions) return UNINITIALIZED; read_machine(); *answer = count; return OK; }
status nvmlDeviceGetCount(u32 *answer) { return nvmlDeviceGetCount_v2(answer); }
status nvmlDeviceGetHandleByIndex_v2(u32 index, void **handle) {
    if (!sessions) return UNINITIALIZED;
    read_machine();
    if (index >= (u32)count) return INVALID_ARGUMENT;
    *handle = (void *)(long)(index + 1);
    return gpus[index].lost ? GPU_IS_LOST : gpus[index].closed ? NO_PERMISSION : OK;
}
status nvmlDeviceGetHandleByIndex(u32 index, void **handle) { return nvmlDeviceGetHandleByIndex_v2(index, handle); }
status nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    read_machine();
    for (int i = 0; i < count; i++)
        if (!strcmp(gpus[i].uuid, uuid)) { *handle = (void *)(long)(i + 1); return OK; }
    return NOT_FOUND;
}
static void bus_id(const Gpu *gpu, char *text, u32 size) { snprintf(text, size, "00000000:%02X:00.0", 0x17 + 0x10 * gpu->index); }
status nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, void **handle) {
    char text[32];
    read_machine();
    for (int i = 0; i < count; i++) {
        bus_id(&gpus[i], text, sizeof text);
        if (!strcasecmp(text, wanted)) { *handle = (void *)(long)(i + 1); return OK; }
    }
    return NOT_FOUND;
}

/* Identity */
status nvmlDeviceGetName(void *handle, char *text, u32 size) {
    FIND;
    if (instance) snprintf(text, size, "%s MIG %s", gpu->name, instance->name);
    else snprintf(text, size, "%s", gpu->name);
    return OK;
}
status nvmlDeviceGetUUID(void *handle, char *text, u32 size) {
    FIND_WITH("uuid");
    if (instance) snprintf(text, size, "MIG-%08x-0000-5000-8000-%012x", 0xb0000000u + gpu->index, (int)(instance - gpu->instance));
    else snprintf(text, size, "%s", gpu->uuid);
    return OK;
}
status nvmlDeviceGetPciInfo_v3(void *handle, PciInfo *answer) {
    FIND;
    memset(answer, 0, sizeof *answer);
    bus_id(gpu, answer->bus_id, sizeof answer->bus_id);
    snprintf(answer->legacy_bus_id, sizeof answer->legacy_bus_id, "0000:%02X:00.0", 0x17 + 0x10 * gpu->index);
    answer->bus = 0x17 + 0x10 * gpu->index;
    answer->device_id = 0x20B010DE;
    return OK;
}
status nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    FIND_WITH("cc");
    *major = gpu->cc_major, *minor = gpu->cc_minor;
    return OK;
}
ANSWER(nvmlDeviceGetIndex, u32, "", instance ? (u32)(instance - gpu->instance) : (u32)gpu->index)
ANSWER(nvmlDeviceGetMinorNumber, u32, "", gpu->index)
ANSWER(nvmlDeviceGetNumGpuCores, u32, "", gpu->cc_major == 8 ? 6912 : 5120)
ANSWER(nvmlDeviceGetArchitecture, u32, "", gpu->cc_major == 9 ? 9 : gpu->cc_major == 8 ? (gpu->cc_minor == 9 ? 8 : 7) : gpu->cc_major == 7 ? (gpu->cc_minor == 5 ? 6 : 5) : 4)

/* Memory */
status nvmlDeviceGetMemoryInfo(void *handle, u64 *total_free_used) {
    FIND_WITH("memory");
    u64 mem = instance ? instance->mem : gpu->mem, used = instance ? instance->used : gpu->used;
    total_free_used[0] = mem * MIB, total_free_used[1] = (mem - used) * MIB, total_free_used[2] = used * MIB;
    return OK;
}
status nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *answer) {
    FIND_WITH("memory");
    if (answer->version != 0x02000028) return ARGUMENT_VERSION_MISMATCH;
    u64 mem = instance ? instance->mem : gpu->mem, used = instance ? instance->used : gpu->used;
    answer->total = mem * MIB, answer->reserved = mem * MIB / 64, answer->used = used * MIB;
    answer->free = answer->total - answer->used - answer->reserved;
    return OK;
}
status nvmlDeviceGetBAR1MemoryInfo(void *handle, u64 *total_free_used) {
    FIND;
    total_free_used[0] = 65536 * MIB, total_free_used[2] = 2 * MIB, total_free_used[1] = total_free_used[0] - total_free_used[2];
    return OK;
}

/* Load */
/* NVML has no utilisation for a GPU in MIG mode. */
status nvmlDeviceGetUtilizationRates(void *handle, u32 *rates) { FIND_WITH("util"); if (gpu->migmode) return NOT_SUPPORTED; rates[0] = gpu->util, rates[1] = gpu->memutil; return OK; }
status nvmlDeviceGetEncoderUtilization(void *handle, u32 *rate, u32 *period) { FIND; *rate = 0, *period = 167000; return OK; }
status nvmlDeviceGetDecoderUtilization(void *handle, u32 *rate, u32 *period) { FIND; *rate = 0, *period = 167000; return OK; }
status nvmlDeviceGetTemperature(void *handle, int sensor, u32 *answer) { (void)sensor; FIND_WITH("temp"); *answer = gpu->temp; return OK; }
status nvmlDeviceGetTemperatureV(void *handle, TemperatureV *answer) { FIND_WITH("temp"); answer->celsius = gpu->temp; return OK; }
status nvmlDeviceGetFanSpeed(void *handle, u32 *answer) { FIND; if (gpu->fan < 0) return NOT_SUPPORTED; *answer = gpu->fan; return OK; }
ANSWER(nvmlDeviceGetPowerUsage, u32, "power", gpu->power * 1000)
ANSWER(nvmlDeviceGetEnforcedPowerLimit, u32, "power", gpu->limit * 1000)
ANSWER(nvmlDeviceGetPowerManagementLimit, u32, "", gpu->limit * 1000)
ANSWER(nvmlDeviceGetTotalEnergyConsumption, u64, "", 1000ull * gpu->power)
ANSWER(nvmlDeviceGetPerformanceState, int, "", gpu->util ? 0 : 8)
ANSWER(nvmlDeviceGetComputeMode, int, "", 0)
ANSWER(nvmlDeviceGetPersistenceMode, int, "", 1)
ANSWER(nvmlDeviceGetDisplayActive, int, "", 0)
ANSWER(nvmlDeviceGetDisplayMode, int, "", 0)
ANSWER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "throttle", gpu->throttle)
ANSWER(nvmlDeviceGetCurrentClocksEventReasons, u64, "throttle", gpu->throttle)
status nvmlDeviceGetClockInfo(void *handle, int kind, u32 *answer) { FIND_WITH("clock"); *answer = kind == 2 ? 1215 : gpu->clock; return OK; }
status nvmlDeviceGetMaxClockInfo(void *handle, int kind, u32 *answer) { FIND; *answer = kind == 2 ? 1215 : 1410; return OK; }
status nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, u64 *answer) { (void)counter; FIND_WITH("ecc"); *answer = kind == 1 ? gpu->ecc : 0; return OK; }

/* MIG */
status nvmlDeviceGetMigMode(void *handle, u32 *current, u32 *pending) {
    FIND;
    if (gpu->cc_major < 8) return NOT_SUPPORTED;
    *current = *pending = gpu->migmode;
    return OK;
}
ANSWER(nvmlDeviceGetMaxMigDeviceCount, u32, "", gpu->migmode ? MAX_INSTANCES : 0)
ANSWER(nvmlDeviceIsMigDeviceHandle, u32, "", instance != 0)
status nvmlDeviceGetMigDeviceHandleByIndex(void *handle, u32 slot, void **answer) {
    FIND;
    if (slot >= (u32)gpu->instances) return NOT_FOUND;
    *answer = (void *)(long)(1000 * (gpu->index + 1) + slot + 1);
    return OK;
}
status nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **answer) { FIND; *answer = (void *)(long)(gpu->index + 1); return OK; }
ANSWER(nvmlDeviceGetGpuInstanceId, u32, "", instance ? (u32)(instance - gpu->instance) + 1 : 0)
ANSWER(nvmlDeviceGetComputeInstanceId, u32, "", 0)
status nvmlDeviceGetAttributes_v2(void *handle, Attributes *answer) {
    FIND;
    if (!instance) return INVALID_ARGUMENT;
    memset(answer, 0, sizeof *answer);
    answer->gpu_slices = answer->compute_slices = instance->slices, answer->sms = 14 * instance->slices;
    answer->mem_mb = instance->mem;
    return OK;
}

/* Processes */
static status list_processes(void *handle, u32 *size, void *out, int first_layout) {
    FIND_WITH("procs");
    u32 room = *size;
    if (instance) { *size = 0; return OK; }
    *size = gpu->processes;
    if (!gpu->processes) return OK;
    if (!out || room < (u32)gpu->processes) return INSUFFICIENT_SIZE;
    for (int i = 0; i < gpu->processes; i++)
        if (first_layout) {
            struct { u32 pid; u64 used; } *list = out;
            list[i].pid = gpu->pid[i], list[i].used = gpu->pid_mem[i];
        } else {
            ProcessInfo *list = out;
            list[i].pid = gpu->pid[i], list[i].used = gpu->pid_mem[i];
            list[i].gpu_instance = list[i].compute_instance = 0xFFFFFFFF;
        }
    return OK;
}
status nvmlDeviceGetComputeRunningProcesses_v3(void *handle, u32 *size, void *out) { return list_processes(handle, size, out, 0); }
status nvmlDeviceGetComputeRunningProcesses_v2(void *handle, u32 *size, void *out) { return list_processes(handle, size, out, 0); }
status nvmlDeviceGetComputeRunningProcesses(void *handle, u32 *size, void *out) { return list_processes(handle, size, out, 1); }
#define NO_PROCESSES(function) status function(void *handle, u32 *size, void *out) { FIND_WITH("procs"); (void)out; *size = 0; return OK; }
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
status nvmlDeviceGetProcessUtilization(void *handle, void *out, u32 *size, u64 since) {
    FIND;
    u32 room = *size;
    *size = gpu->processes;
    if (!gpu->processes) return NOT_FOUND;
    if (!out || room < (u32)gpu->processes) return INSUFFICIENT_SIZE;
    struct { u32 pid; u64 time; u32 sm, mem, encoder, decoder; } *list = out;
    for (int i = 0; i < gpu->processes; i++) {
        list[i].pid = gpu->pid[i], list[i].time = since + 1, list[i].encoder = list[i].decoder = 0;
        list[i].sm = gpu->util / gpu->processes, list[i].mem = gpu->memutil / gpu->processes;
    }
    return OK;
}

/* Links: GPUs of one NUMA node meet at a host bridge (30), others across the system (50) */
status nvmlDeviceGetTopologyCommonAncestor(void *handle, void *other, int *level) {
    FIND;
    Gpu *peer = gpu_of(other, 0);
    if (!peer) return INVALID_ARGUMENT;
    *level = gpu == peer ? 0 : gpu->numa == peer->numa ? 30 : 50;
    return OK;
}
status nvmlDeviceGetP2PStatus(void *handle, void *other, int capability, int *answer) {
    FIND;
    Gpu *peer = gpu_of(other, 0);
    if (!peer) return INVALID_ARGUMENT;
    int joined = gpu != peer && gpu->nvlink && gpu->nvlink == peer->nvlink;
    *answer = capability == 2 ? (joined ? 0 : 5) : (strcmp(gpu->name, peer->name) ? 5 : 0);
    return OK;
}
static Gpu *peer_of(Gpu *gpu, u32 link) {
    Gpu *peers[MAX_GPUS];
    int found = 0;
    for (int i = 0; i < count; i++)
        if (&gpus[i] != gpu && gpu->nvlink && gpus[i].nvlink == gpu->nvlink) peers[found++] = &gpus[i];
    return found && link < (u32)gpu->links ? peers[link % found] : 0;
}
status nvmlDeviceGetNvLinkState(void *handle, u32 link, u32 *active) {
    FIND_WITH("nvlink");
    if (!gpu->nvlink) return NOT_SUPPORTED;
    if (link >= (u32)gpu->links) return INVALID_ARGUMENT;
    *active = peer_of(gpu, link) != 0;
    return OK;
}
status nvmlDeviceGetNvLinkVersion(void *handle, u32 link, u32 *answer) { (void)link; FIND_WITH("nvlink"); if (!gpu->nvlink) return NOT_SUPPORTED; *answer = gpu->linkversion; return OK; }
status nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, u32 link, u32 *answer) { FIND; if (!peer_of(gpu, link)) return NOT_SUPPORTED; *answer = 0; return OK; }
status nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, u32 link, PciInfo *answer) {
    FIND;
    Gpu *peer = peer_of(gpu, link);
    return peer ? nvmlDeviceGetPciInfo_v3((void *)(long)(peer->index + 1), answer) : NOT_SUPPORTED;
}
status nvmlDeviceGetMemoryAffinity(void *handle, u32 words, unsigned long *nodes, int scope) {
    (void)scope;
    FIND_WITH("numa");
    memset(nodes, 0, words * sizeof *nodes);
    nodes[gpu->numa / 64] = 1ul << gpu->numa % 64;
    return OK;
}
/* Fields: bytes over PCIe (198 in, 197 out) and KiB over all NVLinks (139 in, 138 out) since the driver started. */
typedef struct { u32 field, scope; long long time, latency; int type, answer; u64 value; } FieldValue;
status nvmlDeviceGetFieldValues(void *handle, int wanted, FieldValue *values) {
    FIND;
    for (int i = 0; i < wanted; i++) {
        int pcie = values[i].field == 197 || values[i].field == 198, link = values[i].field == 138 || values[i].field == 139;
        u64 *counter = &counted[gpu->index][2 * link + values[i].field % 2];
        values[i].answer = lacks(gpu, "counters") || !(pcie || (link && gpu->nvlink)) ? NOT_SUPPORTED : OK;
        values[i].type = 3;
        values[i].value = *counter += pcie ? gpu->pcie : gpu->nvlinkkib;
    }
    return OK;
}
/* Events: a GPU with xid= tells it once to a set that it is registered with. */
typedef struct { void *device; u64 type, data; u32 gpu_instance, compute_instance; } Event;
status nvmlEventSetCreate(void **set) { *set = (void *)1; return OK; }
status nvmlEventSetFree(void *set) { (void)set; return OK; }
status nvmlDeviceRegisterEvents(void *handle, u64 types, void *set) { (void)types; (void)set; FIND_WITH("events"); watched[gpu->index] = 1; return OK; }
status nvmlEventSetWait_v2(void *set, Event *event, u32 timeout_ms) {
    (void)set; (void)timeout_ms;
    read_machine();
    for (int i = 0; i < count; i++)
        if (watched[i] && gpus[i].xid && told[i] != gpus[i].xid) {
            told[i] = gpus[i].xid;
            event->device = (void *)(long)(i + 1), event->type = 8, event->data = gpus[i].xid;
            return OK;
        }
    return TIMEOUT;
}
status nvmlDeviceGetPcieThroughput(void *handle, int counter, u32 *answer) { (void)counter; FIND_WITH("pcie"); *answer = 1000; return OK; }
ANSWER(nvmlDeviceGetMaxPcieLinkGeneration, u32, "pcie", gpu->pciegen)
ANSWER(nvmlDeviceGetMaxPcieLinkWidth, u32, "pcie", 16)
ANSWER(nvmlDeviceGetCurrPcieLinkWidth, u32, "pcie", gpu->pciewidth)
/* An idle GPU trains its link down. */
ANSWER(nvmlDeviceGetCurrPcieLinkGeneration, u32, "pcie", gpu->util ? gpu->pciegen : 1)
status nvmlDeviceGetDriverModel(void *handle, int *current, int *pending) { (void)handle; (void)current; (void)pending; return NOT_SUPPORTED; }
status nvmlDeviceGetDriverModel_v2(void *handle, int *current, int *pending) { return nvmlDeviceGetDriverModel(handle, current, pending); }
