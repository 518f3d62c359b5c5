{{- define "winnow.podSecurity" -}}
automountServiceAccountToken: false
# Else Kubernetes puts the addresses of Services into the environment, under names that begin with WINNOW_ too.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "winnow.placement" -}}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "winnow.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The annotations of a pod, with their key, if there are any. */}}
{{- define "winnow.podAnnotations" -}}
{{- if or (not .Values.auth.existingSecret) .Values.podAnnotations }}
annotations:
  {{- include "winnow.podAnnotationValues" . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "winnow.podAnnotationValues" -}}
{{- if not .Values.auth.existingSecret }}
checksum/secret: {{ include (print $.Template.BasePath "/secret.yaml") . | sha256sum }}
{{- end }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "winnow.serviceContainer" -}}
- name: service
  image: "{{ .Values.service.image.repository }}:{{ .Values.service.image.tag | default .Chart.AppVersion }}"
  imagePullPolicy: {{ .Values.service.image.pullPolicy }}
  args:
    - serve
    - --host=0.0.0.0
    - --port={{ .Values.service.port }}
  env:
    - name: WINNOW_RUNTIME_URL
      {{- if eq .Values.topology "gateway" }}
      # The balancer beside it.
      value: http://127.0.0.1:30001
      {{- else }}
      value: http://127.0.0.1:{{ .Values.runtime.port }}
      {{- end }}
    - name: WINNOW_STORE_URL
      value: {{ if eq .Values.redis.mode "bundled" }}redis://{{ include "winnow.fullname" . }}-redis:6379/0{{ else }}{{ .Values.redis.external.url | quote }}{{ end }}
    - name: WINNOW_STORE_NAMESPACE
      value: {{ include "winnow.fullname" . }}
    {{- if include "winnow.hasRedisPassword" . }}
    - name: WINNOW_STORE_PASSWORD
      valueFrom:
        secretKeyRef:
          name: {{ include "winnow.secret" . }}
          key: redis-password
          # An external Redis may have none.
          optional: {{ eq .Values.redis.mode "external" }}
    {{- end }}
    - name: WINNOW_ADMIN_KEY
      valueFrom:
        secretKeyRef:
          name: {{ include "winnow.secret" . }}
          key: admin-key
    {{- if eq .Values.topology "gateway" }}
    - name: WINNOW_RUNTIME_API_KEY
      valueFrom:
        secretKeyRef:
          name: {{ include "winnow.secret" . }}
          key: runtime-api-key
    {{- end }}
    {{- if .Values.service.publicMetrics }}
    - name: WINNOW_METRICS_PUBLIC
      value: "true"
    {{- end }}
    {{- range $name, $value := .Values.service.env }}
    - name: {{ $name }}
      value: {{ $value | quote }}
    {{- end }}
  ports:
    - name: http
      containerPort: {{ .Values.service.port }}
  startupProbe:
    httpGet:
      path: /healthz
      port: http
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    httpGet:
      path: /healthz
      port: http
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  readinessProbe:
    httpGet:
      path: /readyz
      port: http
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: 2
  lifecycle:
    preStop:
      exec:
        # Until no request is sent here any more.
        command: [sleep, "5"]
  resources:
    {{- toYaml .Values.service.resources | nindent 4 }}
  securityContext:
    {{- include "winnow.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
{{- end }}

{{- define "winnow.balancerContainer" -}}
- name: balancer
  image: "{{ .Values.balancer.image.repository }}:{{ .Values.balancer.image.tag }}"
  imagePullPolicy: {{ .Values.balancer.image.pullPolicy }}
  args: [haproxy, -f, /etc/haproxy/haproxy.cfg, -f, /etc/haproxy/runtimes.cfg]
  env:
    - name: WINNOW_BALANCER_BIND
      value: 127.0.0.1:30001
    - name: WINNOW_BALANCER_METRICS_BIND
      value: ":8405"
  ports:
    - name: balancer
      containerPort: 8405
  startupProbe:
    httpGet:
      path: /healthz
      port: balancer
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    httpGet:
      path: /healthz
      port: balancer
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  # Whether any runtime answers is for the service beside it to say.
  readinessProbe:
    httpGet:
      path: /healthz
      port: balancer
    periodSeconds: 5
  lifecycle:
    preStop:
      exec:
        # The streams of the service, which is told to stop at the same time, pass through it.
        command: [sleep, {{ include "winnow.afterService" . | quote }}]
  resources:
    {{- toYaml .Values.balancer.resources | nindent 4 }}
  securityContext:
    {{- include "winnow.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: balancer
      mountPath: /etc/haproxy
      readOnly: true
{{- end }}

{{/* Seconds after which a service that is told to stop has ended: it takes requests for 5, then finishes those that run. */}}
{{- define "winnow.afterService" -}}
{{- dig "WINNOW_DRAIN_TIMEOUT_SECONDS" 45 .Values.service.env | int | add 7 -}}
{{- end }}

{{/* Called with the root and a list of arguments that say which part of a runtime this is. */}}
{{- define "winnow.runtimeContainer" -}}
{{- $part := index . 1 }}
{{- with index . 0 }}
- name: runtime
  image: "{{ .Values.runtime.image.repository }}:{{ .Values.runtime.image.tag | default (printf "%s-cuda" .Chart.AppVersion) }}"
  imagePullPolicy: {{ .Values.runtime.image.pullPolicy }}
  args:
    - --host={{ if eq .Values.topology "gateway" }}0.0.0.0{{ else }}127.0.0.1{{ end }}
    - --port={{ .Values.runtime.port }}
    - --model-path={{ .Values.runtime.model.path }}
    - --served-model-name={{ .Values.runtime.model.name }}
    {{- if eq .Values.topology "gateway" }}
    - --api-key=$(RUNTIME_API_KEY)
    - --enable-metrics
    {{- end }}
    {{- range $part }}
    - {{ . }}
    {{- end }}
    {{- range .Values.runtime.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- if eq .Values.topology "gateway" }}
    - name: RUNTIME_API_KEY
      valueFrom:
        secretKeyRef:
          name: {{ include "winnow.secret" . }}
          key: runtime-api-key
    {{- end }}
    - name: HOME
      value: /home/winnow
    {{- range $name, $value := .Values.runtime.env }}
    - name: {{ $name }}
      value: {{ $value | quote }}
    {{- end }}
  lifecycle:
    preStop:
      exec:
        {{- if eq .Values.topology "gateway" }}
        # Until the balancers have looked up its name again: their look-ups, and the cluster's DNS, are some seconds old.
        command: [sleep, "30"]
        {{- else }}
        # The service beside it, told to stop at the same time, still takes requests for 5 seconds, and then finishes
        # those that run. With it nothing would be left to answer them.
        command: [sleep, {{ include "winnow.afterService" . | quote }}]
        {{- end }}
  resources:
    {{- toYaml .Values.runtime.resources | nindent 4 }}
  securityContext:
    {{- include "winnow.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: home
      mountPath: /home/winnow
    - name: shared-memory
      mountPath: /dev/shm
    {{- if .Values.runtime.model.volume }}
    - name: models
      mountPath: /models
      readOnly: true
    {{- end }}
{{- end }}
{{- end }}

{{/* Probes of the part that listens: by a command, because on loopback the kubelet cannot reach it. */}}
{{- define "winnow.runtimeProbes" -}}
{{- $command := printf "[healthcheck, \"http://127.0.0.1:%v/health\"]" .Values.runtime.port }}
  startupProbe:
    exec:
      command: {{ $command }}
    periodSeconds: 5
    timeoutSeconds: 11
    failureThreshold: {{ div .Values.runtime.startupSeconds 5 }}
  livenessProbe:
    exec:
      command: {{ $command }}
    periodSeconds: 20
    timeoutSeconds: 11
    failureThreshold: 6
  {{- if eq .Values.topology "gateway" }}
  readinessProbe:
    exec:
      command: {{ $command }}
    periodSeconds: 5
    timeoutSeconds: 11
    failureThreshold: 2
  ports:
    - name: runtime
      containerPort: {{ .Values.runtime.port }}
  {{- end }}
{{- end }}

{{- define "winnow.runtimeVolumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.runtime.sharedMemory }}
{{- with .Values.runtime.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The pod that answers: the runtime, or its leader, with the service beside it in the sidecar topology. */}}
{{- define "winnow.runtimePod" -}}
{{- $root := index . 0 }}
{{- with $root }}
metadata:
  labels:
    {{- include "winnow.labels" (list . "runtime") | nindent 4 }}
  {{- include "winnow.podAnnotations" . | nindent 2 }}
spec:
  {{- include "winnow.podSecurity" . | nindent 2 }}
  {{- include "winnow.placement" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ .Values.runtime.terminationGracePeriodSeconds }}
  containers:
    {{- include "winnow.runtimeContainer" (list . (index $ 1)) | nindent 4 }}
    {{- include "winnow.runtimeProbes" . | nindent 4 }}
    {{- if eq .Values.topology "sidecar" }}
    {{- include "winnow.serviceContainer" . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "winnow.runtimeVolumes" . | nindent 4 }}
{{- end }}
{{- end }}
