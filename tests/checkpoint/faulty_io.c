/* Preloaded: writes to files below $FAULTY_DIR fail, stop or crawl once a number of bytes has passed.
 *
 * $FAULTY_CONTROL is a file of two 64-bit numbers, kind and bytes left, mapped shared: all processes of a test see the
 * same quota, and the test changes it by writing to the file. Kinds: 0 healthy, 1 EDQUOT, 2 stuck, 3 slow,
 * 4 EDQUOT at fsync alone (as NFS tells it), 5 reads are stuck. This kernel has no quotas, so a real one cannot be had.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { HEALTHY, QUOTA, STUCK, SLOW, QUOTA_AT_SYNC, STUCK_READ };
struct control { int64_t kind, left; };
static struct control *control;
static const char *below;

__attribute__((constructor)) static void start(void)
{
	const char *path = getenv("FAULTY_CONTROL");
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	below = getenv("FAULTY_DIR");
	if (fd < 0 || !below)
		return;
	control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (control == MAP_FAILED)
		control = NULL;
	close(fd);
}

static int is_ours(int fd)
{
	char link[64], path[4096];
	if (!control || control->kind == HEALTHY)
		return 0;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, path, sizeof path - 1);
	return n > 0 && (path[n] = 0, !strncmp(path, below, strlen(below)));
}

/* 0: go on; -1: errno is set */
static int pass(int fd, size_t count)
{
	if (!is_ours(fd) || control->kind >= QUOTA_AT_SYNC)
		return 0;
	if (__atomic_sub_fetch(&control->left, (int64_t)count, __ATOMIC_SEQ_CST) >= 0)
		return 0;
	while (control->kind == STUCK)
		usleep(10000);
	if (control->kind == SLOW)
		usleep(20000);
	if (control->kind != QUOTA)
		return 0;
	errno = EDQUOT;
	return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t n) { return pass(fd, n) ? -1 : REAL(write)(fd, data, n); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { return pass(fd, n) ? -1 : REAL(pwrite)(fd, data, n, at); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at)
{
	return pass(fd, n) ? -1 : REAL(pwrite64)(fd, data, n, at);
}
ssize_t writev(int fd, const struct iovec *parts, int n)
{
	size_t count = 0;
	for (int i = 0; i < n; i++)
		count += parts[i].iov_len;
	return pass(fd, count) ? -1 : REAL(writev)(fd, parts, n);
}
/* taking room counts against the quota, and gives the bytes back: the writes into it are counted again */
static int take_room(int fd, int64_t size)
{
	if (!is_ours(fd) || control->kind != QUOTA || control->left >= size)
		return 0;
	errno = EDQUOT;
	return -1;
}
int fallocate(int fd, int mode, off_t at, off_t size) { return take_room(fd, size) ? -1 : REAL(fallocate)(fd, mode, at, size); }
int fallocate64(int fd, int mode, off64_t at, off64_t size)
{
	return take_room(fd, size) ? -1 : REAL(fallocate64)(fd, mode, at, size);
}
int fsync(int fd)
{
	if (is_ours(fd) && control->kind == QUOTA_AT_SYNC) {
		errno = EDQUOT;
		return -1;
	}
	return REAL(fsync)(fd);
}

static void wait_to_read(int fd)
{
	while (is_ours(fd) && control->kind == STUCK_READ)
		usleep(10000);
}
ssize_t read(int fd, void *data, size_t n) { wait_to_read(fd); return REAL(read)(fd, data, n); }
ssize_t readv(int fd, const struct iovec *parts, int n) { wait_to_read(fd); return REAL(readv)(fd, parts, n); }
ssize_t pread(int fd, void *data, size_t n, off_t at) { wait_to_read(fd); return REAL(pread)(fd, data, n, at); }
ssize_t pread64(int fd, void *data, size_t n, off64_t at) { wait_to_read(fd); return REAL(pread64)(fd, data, n, at); }
ssize_t preadv(int fd, const struct iovec *parts, int n, off_t at)
{
	wait_to_read(fd);
	return REAL(preadv)(fd, parts, n, at);
}
ssize_t preadv64(int fd, const struct iovec *parts, int n, off64_t at)
{
	wait_to_read(fd);
	return REAL(preadv64)(fd, parts, n, at);
}
